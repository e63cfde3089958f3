"""Prompts and verifiers: what the policy is asked, and what its answers are worth. No torch here.

    TaskMix(config.task, seed).draw(step, count)   prompts of a step, mixed over the sources    (mix.py)
    render(prompt, config.task, tokenizer)         the prompt's token ids                       (prompts.py)
    VerifierPool(config.task).score(...)           the reward of what the policy wrote          (pool.py)
    write_trace(source, entry)                     a worked answer, for supervised training     (traces.py)

To add a task, the cheapest way that does:

1.  A task of reasoning-gym: name it, with its parameters, in the config.

        task:
          sources:
            - {type: reasoning_gym, name: gcd, weight: 2, params: {max_value: 100}}

2.  Examples in a file: JSONL or Parquet, each row with `prompt` (text, or a list of chat messages; a column
    called `messages` does too) and `answer`, and a verifier: `exact`, `regex` (the row's answer is the pattern),
    `math_verify`, or a function of yours.

        - {type: file, path: data/puzzles.jsonl, verifier: "my_checks:score"}

    `my_checks.score(answer: str, entry: dict) -> float` gets the answer found by `task.answer_pattern` and the
    whole row, with `answer` as text. It runs in a process of its own that may be killed: keep no state. To be given
    all of the text, set `task.answer_pattern: (?s)(.+)`.

3.  Procedural prompts of your own: a class beside `GymPrompts` with `label`, `held_out` and `at(position)`, pure
    functions of its arguments, and a branch for it in `mix._open` and `verifiers.score_answer`.
"""
