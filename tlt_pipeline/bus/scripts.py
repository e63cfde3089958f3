"""The Lua scripts of the bus: each is one atomic step on the server, harmless when its reply is lost and it runs again.

`#!lua` without flags makes the server refuse the whole script when it is out of memory, so that none stops half way;
acknowledging is allowed even then, because it is what frees memory. Entries have one field, `b`: the message's bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Script:
    name: str
    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


_REFUSED_AT_OOM = "#!lua\n"
_ALLOWED_AT_OOM = "#!lua flags=allow-oom\n"

# is_pending: the entry is still owed by the group (whoever holds it). A group that is gone owes nothing.
_PENDING = """
local function is_pending(key, group, id)
  local found = redis.pcall('XPENDING', key, group, id, id, 1)
  return found.err == nil and #found > 0
end
"""

# settle: acknowledges entries; `removal` ack: deletes them; all: deletes what all groups are done with.
_SETTLE = """
local function trim_done(key, groups)
  local last = {}
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    local info = {}
    for i = 1, #flat, 2 do info[flat[i]] = flat[i + 1] end
    last[info['name']] = info['last-delivered-id']
  end
  local low_ms, low_seq, low = nil, nil, nil
  for _, group in ipairs(groups) do
    if not last[group] then return end
    local pending = redis.call('XPENDING', key, group)
    local ms, seq
    if pending[1] > 0 then
      ms, seq = string.match(pending[2], '^(%d+)-(%d+)$')
    else
      ms, seq = string.match(last[group], '^(%d+)-(%d+)$')
      seq = string.format('%.0f', tonumber(seq) + 1)
    end
    local n_ms, n_seq = tonumber(ms), tonumber(seq)
    if not low or n_ms < low_ms or (n_ms == low_ms and n_seq < low_seq) then
      low_ms, low_seq, low = n_ms, n_seq, ms .. '-' .. seq
    end
  end
  if low then redis.call('XTRIM', key, 'MINID', low) end
end

local function settle(key, group, removal, groups, ids)
  local count = 0
  for _, id in ipairs(ids) do
    count = count + redis.call('XACK', key, group, id)
    if removal == 'ack' then redis.call('XDEL', key, id) end
  end
  if removal == 'all' and redis.call('EXISTS', key) == 1 then trim_done(key, groups) end
  return count
end
"""

# KEYS stream, seen; ARGV body, bound, ttl_s, token of this call
SUBMIT = Script(
    "submit",
    _REFUSED_AT_OOM
    + """
local seen = redis.call('GET', KEYS[2])
if seen == ARGV[4] then return 'queued' end
if seen then return 'duplicate' end
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[2]) then return 'full' end
redis.call('SET', KEYS[2], ARGV[4], 'EX', ARGV[3])
redis.call('XADD', KEYS[1], '*', 'b', ARGV[1])
return 'queued'
""",
)

# KEYS stream, call; ARGV body, bound, ttl_s. The call's key holds the entry id for a repeated call.
APPEND = Script(
    "append",
    _REFUSED_AT_OOM
    + """
local done = redis.call('GET', KEYS[2])
if done then return done end
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[2]) then return 'full' end
local id = redis.call('XADD', KEYS[1], '*', 'b', ARGV[1])
redis.call('SET', KEYS[2], id, 'EX', ARGV[3])
return id
""",
)

# KEYS stream, call, latest; ARGV body, length, ttl_s
BROADCAST = Script(
    "broadcast",
    _REFUSED_AT_OOM
    + """
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'b', ARGV[1])
redis.call('SET', KEYS[3], ARGV[1])
redis.call('SET', KEYS[2], '1', 'EX', ARGV[3])
return 1
""",
)

# KEYS source, target, call; ARGV group, id, removal, result, bound, ttl_s, groups…
COMPLETE = Script(
    "complete",
    _REFUSED_AT_OOM
    + _PENDING
    + _SETTLE
    + """
if redis.call('EXISTS', KEYS[3]) == 1 then return 'done' end
if not is_pending(KEYS[1], ARGV[1], ARGV[2]) then return 'settled' end
if redis.call('XLEN', KEYS[2]) >= tonumber(ARGV[5]) then return 'full' end
redis.call('XADD', KEYS[2], '*', 'b', ARGV[4])
redis.call('SET', KEYS[3], '1', 'EX', ARGV[6])
settle(KEYS[1], ARGV[1], ARGV[3], {unpack(ARGV, 7)}, {ARGV[2]})
return 'done'
""",
)

# KEYS source, dead letters, marker; ARGV group ('' for a plain reader), id, removal, letter, length, ttl_s,
# groups…
BURY = Script(
    "bury",
    _REFUSED_AT_OOM
    + _PENDING
    + _SETTLE
    + """
if ARGV[1] ~= '' and not is_pending(KEYS[1], ARGV[1], ARGV[2]) then return 0 end
local first = redis.call('SET', KEYS[3], '1', 'NX', 'EX', ARGV[6])
if first then redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'b', ARGV[4]) end
if ARGV[1] ~= '' then settle(KEYS[1], ARGV[1], ARGV[3], {unpack(ARGV, 7)}, {ARGV[2]}) end
return first and 1 or 0
""",
)

# KEYS stream; ARGV group, removal, number of groups, groups…, ids…
ACK = Script(
    "ack",
    _ALLOWED_AT_OOM
    + _SETTLE
    + """
local count = tonumber(ARGV[3])
return settle(KEYS[1], ARGV[1], ARGV[2], {unpack(ARGV, 4, 3 + count)}, {unpack(ARGV, 4 + count)})
""",
)

# KEYS stream; ARGV group, consumer, ids…; the ids that are still this consumer's, their idle time back to 0
RENEW = Script(
    "renew",
    _ALLOWED_AT_OOM
    + """
local held = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local own = redis.pcall('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2])
  if own.err == nil and #own > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'JUSTID')
    held[#held + 1] = id
  end
end
return held
""",
)

# KEYS stream; ARGV group, consumer, idle_ms, then id, attempts… : given back, claimable at once, uncounted
RELEASE = Script(
    "release",
    _ALLOWED_AT_OOM
    + """
for i = 4, #ARGV, 2 do
  local id = ARGV[i]
  local own = redis.pcall('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[2])
  if own.err == nil and #own > 0 then
    local count = ARGV[i + 1]
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'IDLE', ARGV[3], 'RETRYCOUNT', count, 'JUSTID')
  end
end
return 1
""",
)

# KEYS stream; ARGV group, consumer, idle_ms, count, held ids…; abandoned entries as {id, fields, attempt}. Not
# XAUTOCLAIM: that would hand a consumer the work it has in hand, when it was too busy to renew its lease.
CLAIM = Script(
    "claim",
    _ALLOWED_AT_OOM
    + """
local held, start, wanted, out = {}, '-', tonumber(ARGV[4]), {}
for i = 5, #ARGV do held[ARGV[i]] = true end
repeat
  local page = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], start, '+', 200)
  for _, entry in ipairs(page) do
    if #out < wanted and not held[entry[1]] then
      local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], entry[1])
      if #claimed > 0 then out[#out + 1] = {entry[1], claimed[1][2], entry[4] + 1} end
    end
  end
  if #page > 0 then start = '(' .. page[#page][1] end
until #page == 0 or #out >= wanted
return out
""",
)

# KEYS stream; ARGV group, consumer, start, count, counted (1: a new attempt), held ids…
# The consumer's own entries that it doesn't hold, as {id, fields, attempt}; before them, where to go on.
RECLAIM = Script(
    "reclaim",
    _ALLOWED_AT_OOM
    + """
local held, out, counted = {}, {}, tonumber(ARGV[5])
for i = 6, #ARGV do held[ARGV[i]] = true end
local own = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])
for _, entry in ipairs(own) do
  if not held[entry[1]] then
    local attempt = entry[4] + counted
    local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry[1], 'RETRYCOUNT', attempt)
    if #claimed > 0 then out[#out + 1] = {entry[1], claimed[1][2], attempt} end
  end
end
return {#own > 0 and '(' .. own[#own][1] or '', out}
""",
)

# KEYS state, token, then those of the plan by index; ARGV token, expected token, state, plan (msgpack):
# acks [[key, group, removal, groups, ids]], adds [[key, body, seen key or 0]], forget [key], bound, ttl
COMMIT = Script(
    "commit",
    _REFUSED_AT_OOM
    + _SETTLE
    + """
local current = redis.call('GET', KEYS[2])
if current == ARGV[1] then return 'done' end
if current and current ~= ARGV[2] then return 'fenced' end
local plan = cmsgpack.unpack(ARGV[4])
local room, fresh = {}, {}
for i, add in ipairs(plan.adds) do
  if add[3] == 0 or redis.call('EXISTS', KEYS[add[3]]) == 0 then
    fresh[#fresh + 1] = add
    local key = KEYS[add[1]]
    room[key] = (room[key] or (plan.bound - redis.call('XLEN', key))) - 1
    if room[key] < 0 then return 'full ' .. key end
  end
end
redis.call('SET', KEYS[1], ARGV[3])
redis.call('SET', KEYS[2], ARGV[1])
for _, add in ipairs(fresh) do
  redis.call('XADD', KEYS[add[1]], '*', 'b', add[2])
  if add[3] ~= 0 then redis.call('SET', KEYS[add[3]], ARGV[1], 'EX', plan.ttl) end
end
for _, ack in ipairs(plan.acks) do settle(KEYS[ack[1]], ack[2], ack[3], ack[4], ack[5]) end
for _, key in ipairs(plan.forget) do redis.call('DEL', KEYS[key]) end
return 'done'
""",
)

# KEYS counter; ARGV floor
NEXT_VERSION = Script(
    "next_version",
    _REFUSED_AT_OOM
    + """
local now = tonumber(redis.call('GET', KEYS[1]) or '0')
local floor = tonumber(ARGV[1])
if floor > now then redis.call('SET', KEYS[1], ARGV[1]) end
return redis.call('INCR', KEYS[1])
""",
)

# KEYS stream; ARGV group; entries not yet delivered to it. Counted in pages: `lag` fails after deletions.
WAITING = Script(
    "waiting",
    _ALLOWED_AT_OOM
    + """
local last = '-'
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local info = {}
  for i = 1, #flat, 2 do info[flat[i]] = flat[i + 1] end
  if info['name'] == ARGV[1] then last = '(' .. info['last-delivered-id'] end
end
local count = 0
repeat
  local page = redis.call('XRANGE', KEYS[1], last, '+', 'COUNT', 200)
  count = count + #page
  if #page > 0 then last = '(' .. page[#page][1] end
until #page == 0
return count
""",
)
