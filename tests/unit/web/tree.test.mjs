// A conversation's tree: what is shown at forks, and how the server's items and the page's own nodes become one.
import assert from "node:assert/strict";
import test from "node:test";
import { fold } from "../../../services/gateway/web/reply.js";
import { itemOf, Tree } from "../../../services/gateway/web/tree.js";

const said = (id, parent, text, reply, active = true) => ({ id, type: "message", role: "user", status: "completed", parent_id: parent, response_id: reply, active, content: [{ type: "input_text", text }] });
const wrote = (reply, parent, text, more = {}) => ({ id: itemOf(reply), type: "message", role: "assistant", status: "completed", parent_id: parent, response_id: reply, active: true, end_reason: "stop_token", model: "chorus", notice: null, content: [{ type: "output_text", text }], ...more });
const shown = (tree) => tree.path().map((node) => node.text ?? node.reply.text);
const named = (node, id) => (node.reply = fold(node.reply, { type: "response.created", sequence_number: 0, response: { id, model: "chorus" } }));

test("the active branch is shown first, and another can be chosen at each fork", () => {
  const tree = new Tree("conv_1");
  tree.merge([said("m1", null, "hi", "resp_a"), wrote("resp_a", "m1", "A", { active: false }), wrote("resp_b", "m1", "B"), said("m2", itemOf("resp_b"), "more", "resp_c"), wrote("resp_c", "m2", "C")]);
  assert.deepEqual(shown(tree), ["hi", "B", "more", "C"]);
  const { at, of, before } = tree.place(tree.path()[1]);
  assert.deepEqual([at, of], [2, 2]);
  tree.choose(before);
  assert.deepEqual(shown(tree), ["hi", "A"]);
  assert.equal(tree.known(tree.leaf()), "resp_a");
});

test("what was sent from here and what the server then lists are the same nodes", () => {
  const tree = new Tree("conv_1");
  const reply = tree.send(tree.root, "hi");
  named(reply, "resp_a");
  const again = tree.regenerate(reply.parent);
  named(again, "resp_b");
  tree.merge([said("m1", null, "hi", "resp_a"), wrote("resp_a", "m1", "A", { active: false }), wrote("resp_b", "m1", "B")]);
  assert.equal(tree.root.children.length, 1);
  assert.deepEqual(tree.path()[0].children, [reply, again]);
  assert.equal(reply.reply.text, "A");
  assert.deepEqual(shown(tree), ["hi", "B"]);
});

test("a reply that is being followed is not overwritten by a list that is older", () => {
  const tree = new Tree("conv_1");
  const reply = tree.send(tree.root, "hi");
  named(reply, "resp_a");
  reply.reply = fold(reply.reply, { type: "response.output_text.delta", sequence_number: 1000, delta: "so far" });
  tree.merge([said("m1", null, "hi", "resp_a"), wrote("resp_a", "m1", "", { status: "in_progress", end_reason: null })], (node) => node === reply);
  assert.equal(reply.reply.text, "so far");
  assert.deepEqual(tree.running(), [reply]);
});

test("an end that was seen is not undone by a list that is older", () => {
  const tree = new Tree("conv_1");
  const reply = tree.send(tree.root, "hi");
  named(reply, "resp_a");
  reply.reply = fold(reply.reply, { type: "response.completed", sequence_number: 9000, response: { id: "resp_a", status: "completed" } });
  tree.merge([said("m1", null, "hi", "resp_a"), wrote("resp_a", "m1", "", { status: "in_progress", end_reason: null })]);
  assert.deepEqual(tree.running(), []);
});

test("an edited message stands beside the old one, under the same reply", () => {
  const tree = new Tree("conv_1");
  tree.merge([said("m1", null, "hi", "resp_a"), wrote("resp_a", "m1", "A"), said("m2", itemOf("resp_a"), "two", "resp_b"), wrote("resp_b", "m2", "B")]);
  const old = tree.path()[2];
  const reply = tree.send(old.parent, "two, better");
  assert.equal(tree.known(old.parent), "resp_a");
  assert.deepEqual(shown(tree), ["hi", "A", "two, better", ""]);
  assert.deepEqual(tree.place(reply.parent).of, 2);
  tree.drop(reply.parent);
  assert.deepEqual(shown(tree), ["hi", "A", "two", "B"]);
});

test("an edited first message follows nothing", () => {
  const tree = new Tree("conv_1");
  tree.merge([said("m1", null, "hi", "resp_a"), wrote("resp_a", "m1", "A")]);
  assert.equal(tree.known(tree.path()[0].parent), null);
});

test("a merge keeps the way that a person chose", () => {
  const tree = new Tree("conv_1");
  const items = [said("m1", null, "hi", "resp_a"), wrote("resp_a", "m1", "A", { active: false }), wrote("resp_b", "m1", "B")];
  tree.merge(items);
  tree.choose(tree.place(tree.path()[1]).before);
  tree.merge(items);
  assert.deepEqual(shown(tree), ["hi", "A"]);
  tree.activate(items);
  assert.deepEqual(shown(tree), ["hi", "B"]);
});

test("instructions are not shown, and what follows them is", () => {
  const tree = new Tree("conv_1");
  tree.merge([{ ...said("m0", null, "be kind", null), role: "system" }, said("m1", "m0", "hi", "resp_a"), wrote("resp_a", "m1", "A")]);
  assert.deepEqual(shown(tree), ["hi", "A"]);
});
