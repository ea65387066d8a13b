// One reply as a fold of its events: seen once each, and every end told apart.
import assert from "node:assert/strict";
import test from "node:test";
import { duration, fold, newReply, note, ofItem, whole } from "../../../services/gateway/web/reply.js";

const created = { type: "response.created", sequence_number: 0, response: { id: "resp_a", model: "chorus", metadata: {} } };
const delta = (number, text) => ({ type: "response.output_text.delta", sequence_number: number, delta: text });
const folded = (...events) => events.reduce(fold, newReply());
const ended = (type, response) => folded(created, delta(1000, "a"), { type, sequence_number: 9000, response: { id: "resp_a", ...response } });

test("text adds up, and events seen again change nothing", () => {
  const reply = folded(created, delta(1000, "a"), delta(1016, "b"), delta(1000, "a"), delta(1016, "b"), delta(1032, "c"));
  assert.equal(reply.text, "abc");
  assert.equal(reply.after, 1032);
  assert.equal(reply.status, "writing");
});

test("every end has its own word", () => {
  const cases = [
    ["response.completed", { status: "completed" }, "complete"],
    ["response.incomplete", { status: "incomplete", incomplete_details: { reason: "max_output_tokens" } }, "length"],
    ["response.incomplete", { status: "incomplete", incomplete_details: { reason: "content_filter" } }, "filtered"],
    ["response.incomplete", { status: "cancelled", incomplete_details: { reason: "user_stop" } }, "stopped"],
    ["response.incomplete", { status: "cancelled", incomplete_details: { reason: "superseded" } }, "superseded"],
    ["response.incomplete", { status: "cancelled", incomplete_details: { reason: "idle" } }, "idle"],
    ["response.failed", { status: "failed", error: { message: "Broken." } }, "failed"],
  ];
  for (const [type, response, end] of cases) assert.equal(ended(type, response).end, end);
  assert.equal(note(ended(...cases[6])), "Broken.");
  assert.equal(note(ended(...cases[0])), "");
});

test("a reply in line says its place and about how long, until it is written", () => {
  const queued = (position, eta_s) => ({ type: "response.queued", sequence_number: position, response: { metadata: { notice: "queued", position: String(position), eta_s } } });
  assert.equal(note(folded(created, queued(12, "40.2"))), "You are number 12 in line: about 41 s.");
  assert.equal(note(folded(created, { type: "response.queued", sequence_number: 1, response: {} })), "Waiting for a free place.");
  assert.equal(note(folded(created, queued(12, "40.2"), delta(1000, "a"))), "");
});

test("another model that answers is said, and a notice of the queue is not taken for it", () => {
  const metadata = { notice: "The mini model answers: your limit is reached.", requested_model: "chorus" };
  assert.equal(folded({ ...created, response: { ...created.response, metadata } }).fallback, metadata.notice);
  assert.equal(folded(created, { type: "response.in_progress", sequence_number: 991, response: { metadata: { notice: "resuming" } } }).fallback, "");
});

test("a response object says the same as its events", () => {
  const response = { id: "resp_a", model: "chorus", status: "cancelled", incomplete_details: { reason: "user_stop" }, output: [{ content: [{ type: "output_text", text: "abc" }] }] };
  const reply = whole(newReply("resp_a"), response);
  assert.deepEqual([reply.text, reply.end], ["abc", "stopped"]);
});

test("a stored item is over with its reason; one in progress is still to be followed", () => {
  assert.equal(ofItem({ status: "incomplete", end_reason: "superseded", response_id: "resp_a" }, "x").end, "superseded");
  assert.equal(ofItem({ status: "in_progress", end_reason: null, response_id: "resp_a" }, "").status, "waiting");
});

test("times are said as people say them", () => {
  assert.deepEqual([3.2, 89, 100, 5400, 90000].map(duration), ["4 s", "89 s", "2 min", "2 h", "25 h"]);
});
