// Server-sent events, however the network cuts them.
import assert from "node:assert/strict";
import test from "node:test";
import { SseParser } from "../../../services/gateway/web/sse.js";

const WIRE = "retry: 1000\nid: 0\nevent: a\ndata: {\"x\":1}\n\n: ping\nid: 16\r\nevent: b\r\ndata: one\r\ndata: two\r\n\r\ndata:bare\n\n";

test("events are the same, cut at every place", () => {
  const whole = new SseParser().feed(WIRE);
  assert.deepEqual(whole, [
    { id: "0", event: "a", data: '{"x":1}' },
    { id: "16", event: "b", data: "one\ntwo" },
    { id: null, event: "message", data: "bare" },
  ]);
  for (let at = 1; at < WIRE.length; at += 1) {
    const parser = new SseParser();
    assert.deepEqual([...parser.feed(WIRE.slice(0, at)), ...parser.feed(WIRE.slice(at))], whole, `cut at ${at}`);
  }
});

test("half an event is not given out", () => {
  const parser = new SseParser();
  assert.deepEqual(parser.feed("id: 1\ndata: x\n"), []);
  assert.equal(parser.feed("\n").length, 1);
});
