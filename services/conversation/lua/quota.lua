-- shared/quota.py, in Valkey: one call, one bucket, whole numbers only (below 2^53, so doubles hold them exactly).
-- KEYS[1]  hash: level, at, reserved, settled, refunded, and `a:<id>` = amount of each lease
-- KEYS[2]  sorted set: lease id -> when it runs out
-- ARGV     reserve id amount capacity per_min now_ms lease_ms ttl_s   ->  {wait_ms, remaining, reset_ms}
--          settle  id used   capacity per_min now_ms 0        ttl_s   ->  {1} or {0}
local UNITS, SWEEP_MAX = 60000, 16
local bucket, leases = KEYS[1], KEYS[2]
local verb, id = ARGV[1], ARGV[2]
local amount, capacity, per_min = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now, lease_ms, ttl = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local full = capacity * UNITS

local function whole(number)
    return string.format('%.0f', number)
end

local stored = redis.call('HMGET', bucket, 'level', 'at')
local level, at = tonumber(stored[1]) or full, tonumber(stored[2]) or now
local passed = math.max(0, now - at)
level, at = math.min(full, level + passed * per_min), at + passed

local function give_back(leased, used)
    level = math.min(full, level + (leased - used) * UNITS)
    redis.call('HINCRBY', bucket, 'settled', whole(used))
    redis.call('HINCRBY', bucket, 'refunded', whole(leased - used))
end

local function take_lease(key)
    local leased = tonumber(redis.call('HGET', bucket, 'a:' .. key))
    redis.call('HDEL', bucket, 'a:' .. key)
    redis.call('ZREM', leases, key)
    return leased
end

local function keep()
    redis.call('HSET', bucket, 'level', whole(level), 'at', whole(at))
    redis.call('EXPIRE', bucket, ttl)
    redis.call('EXPIRE', leases, ttl)
end

if verb == 'settle' then
    local leased = take_lease(id)
    if not leased then
        return {0}
    end
    give_back(leased, math.min(math.max(amount, 0), leased))
    keep()
    return {1}
end

for _, key in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', whole(now), 'LIMIT', 0, SWEEP_MAX)) do
    give_back(take_lease(key) or 0, 0)
end
local wait = 0
if redis.call('HEXISTS', bucket, 'a:' .. id) == 0 then
    local missing = math.min(amount, capacity) * UNITS - level
    if missing > 0 then
        wait = math.ceil(missing / per_min)
    else
        level = level - amount * UNITS
        redis.call('HSET', bucket, 'a:' .. id, whole(amount))
        redis.call('ZADD', leases, whole(now + lease_ms), id)
        redis.call('HINCRBY', bucket, 'reserved', whole(amount))
    end
end
keep()
return {wait, math.floor(math.max(0, level) / UNITS), math.ceil((full - level) / per_min)}
