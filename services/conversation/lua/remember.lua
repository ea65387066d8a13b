-- Keep a history, unless something of its conversation was taken back since it was read.
-- KEYS[1]  a history, or a mark `E<epoch>`: older than that must not be kept
-- ARGV     history, its epoch, seconds
local mark = redis.call('GETRANGE', KEYS[1], 0, 20)
if string.sub(mark, 1, 1) == 'E' and tonumber(string.sub(mark, 2)) > tonumber(ARGV[2]) then
    return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
return 1
