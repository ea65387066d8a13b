// One reply followed over lost connections, refusals and stops, against an API that does as it is told.
import assert from "node:assert/strict";
import test from "node:test";
import { ApiError } from "../../../services/gateway/web/api.js";
import { Follower } from "../../../services/gateway/web/follow.js";
import { newReply } from "../../../services/gateway/web/reply.js";

// A page's events; whoever waits for the network finds it back at once.
globalThis.addEventListener = (name, act) => name === "online" && queueMicrotask(act);
globalThis.removeEventListener = () => {};

const CREATED = { type: "response.created", sequence_number: 0, response: { id: "resp_a", model: "chorus" } };
const DONE = { type: "response.completed", sequence_number: 9000, response: { id: "resp_a", status: "completed" } };
const delta = (number, text) => ({ type: "response.output_text.delta", sequence_number: number, delta: text });
const lost = () => new ApiError("The connection was lost.", 0);

/** A stream: its events in turn; an error is thrown, a function is awaited. */
async function* stream(...steps) {
  for (const step of steps) {
    if (step instanceof Error) throw step;
    if (typeof step === "function") await step();
    else yield step;
  }
}

function follower({ starts, resumes = [], ...api }) {
  const asked = [];
  const node = { reply: newReply() };
  const said = [];
  const following = new Follower({
    api: { resume: ({ after }) => (asked.push(after), stream(...resumes.shift())), stop: async () => {}, ...api },
    node,
    start: () => (asked.push("start"), stream(...starts.shift())),
    changed: () => {},
    lost: (is) => said.push(is),
  });
  return { following, node, asked, said };
}

test("a reply that is cut goes on after the last event that was seen", async () => {
  const { following, node, asked, said } = follower({
    starts: [[CREATED, delta(1000, "a"), lost()]],
    resumes: [[lost()], [delta(1016, "b"), lost()], [delta(1032, "c"), DONE]],
  });
  await following.run();
  assert.deepEqual(asked, ["start", 1000, 1000, 1016]);
  assert.equal(node.reply.text, "abc");
  assert.equal(node.reply.end, "complete");
  assert.ok(said.includes(true) && said.at(-1) === false);
});

test("a message that did not get through is sent again", async () => {
  const { following, node, asked } = follower({ starts: [[lost()], [new ApiError("starting", 503)], [CREATED, DONE]] });
  await following.run();
  assert.deepEqual(asked, ["start", "start", "start"]);
  assert.equal(node.reply.end, "complete");
});

test("a refusal is no lost connection: it is told, and nothing is tried again", async () => {
  for (const error of [new ApiError("limit", 429, "rate_limit_exceeded", 12), new ApiError("full", 503, "lane_full", 3), new ApiError("long", 400)]) {
    const { following, asked } = follower({ starts: [[error]] });
    await assert.rejects(following.run(), error);
    assert.deepEqual(asked, ["start"]);
  }
});

test("a stream with nothing more means that the reply ended meanwhile: it is fetched whole", async () => {
  const whole = { id: "resp_a", status: "completed", output: [{ content: [{ text: "abc" }] }] };
  const { following, node } = follower({ starts: [[CREATED, delta(1000, "a"), lost()]], resumes: [[]], retrieve: async () => whole });
  await following.run();
  assert.deepEqual([node.reply.text, node.reply.end], ["abc", "complete"]);
});

test("a reply that still runs after a stream with nothing more is followed on", async () => {
  const { following, node, asked } = follower({
    starts: [[CREATED, lost()]],
    resumes: [[], [delta(1000, "a"), DONE]],
    retrieve: async () => ({ id: "resp_a", status: "in_progress" }),
  });
  await following.run();
  assert.deepEqual(asked, ["start", 0, 0]);
  assert.equal(node.reply.text, "a");
});

test("a stop before the reply has a name cancels it as soon as it has one, once", async () => {
  const stops = [];
  const end = { type: "response.incomplete", sequence_number: 9000, response: { id: "resp_a", status: "cancelled", incomplete_details: { reason: "user_stop" } } };
  const { following, node } = follower({
    starts: [[() => following.stop(), { type: "chorus.reply", replyId: "resp_a" }, CREATED, () => following.stop(), end]],
    stop: async (id) => stops.push(id),
  });
  await following.run();
  assert.deepEqual(stops, ["resp_a"]);
  assert.equal(node.reply.end, "stopped");
});

test("a stop that does not get through is tried again", async () => {
  let tries = 0;
  const waited = [];
  const cancelled = new Promise((resolve) => waited.push(resolve));
  const { following } = follower({
    starts: [[CREATED, () => following.stop(), () => cancelled, DONE]],
    stop: async () => {
      tries += 1;
      if (tries < 3) throw lost();
      waited[0]();
    },
  });
  await following.run();
  assert.equal(tries, 3);
});

test("whoever lets a reply go hears no more of it, and of no error", async () => {
  const { following, node } = follower({ starts: [[CREATED, delta(1000, "a"), () => following.letGo(), lost()]] });
  await following.run();
  assert.equal(node.reply.text, "a");
  assert.equal(node.reply.end, null);
});
