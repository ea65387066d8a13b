-- services/gateway/limits.py, in Valkey: whole numbers only (below 2^53, so doubles hold them exactly).
-- KEYS[1]  hash: level, at          KEYS[2]  sorted set: request id -> when its lease runs out
-- ARGV     id per_min in_flight now_ms lease_ms ttl_s  ->  {verdict, wait_ms, remaining, reset_ms}
local UNITS = 60000
local visitor, leases, id = KEYS[1], KEYS[2], ARGV[1]
local per_min, in_flight = tonumber(ARGV[2]), tonumber(ARGV[3])
local now, lease_ms, ttl = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local full = per_min * UNITS

local function whole(number)
    return string.format('%.0f', number)
end

local stored = redis.call('HMGET', visitor, 'level', 'at')
local level, at = tonumber(stored[1]) or full, tonumber(stored[2]) or now
local passed = math.max(0, now - at)
level, at = math.min(full, level + passed * per_min), at + passed

redis.call('ZREMRANGEBYSCORE', leases, '-inf', whole(now))
local verdict, wait = 0, 0
if level < UNITS then
    verdict, wait = 1, math.ceil((UNITS - level) / per_min)
elseif redis.call('ZCARD', leases) >= in_flight then
    verdict, wait = 2, 1000
else
    level = level - UNITS
    redis.call('ZADD', leases, whole(now + lease_ms), id)
end
redis.call('HSET', visitor, 'level', whole(level), 'at', whole(at))
redis.call('EXPIRE', visitor, ttl)
redis.call('EXPIRE', leases, ttl)
return {verdict, wait, math.floor(level / UNITS), math.ceil((full - level) / per_min)}
