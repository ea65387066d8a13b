// What is said to those who listen instead of look: whole sentences, in order, and never more than they can follow.
import { isOver, note } from "./reply.js";
import { make } from "./dom.js";
import { Sentences } from "./sentences.js";

const KEPT = 12; // sentences that stay in the region; older ones have been read

export class Announcer {
  #heard = new WeakMap(); // node -> Sentences
  #notes = new WeakMap(); // node -> the last note said

  constructor(region) {
    this.region = region;
  }

  say(sentence) {
    if (!sentence) return;
    this.region.append(make("p", {}, sentence));
    while (this.region.children.length > KEPT) this.region.firstChild.remove();
  }

  /** Says what is new of a reply that is being written. */
  follow(node) {
    const { reply } = node;
    if (!this.#heard.has(node)) this.#heard.set(node, new Sentences());
    this.say(this.#heard.get(node).take(reply.text, isOver(reply)));
    const said = note(reply);
    if (said && said !== this.#notes.get(node) && (isOver(reply) || !this.#notes.has(node))) this.say(said);
    this.#notes.set(node, said);
  }

  /** A reply that was there already, or was read elsewhere: only what comes is said. */
  skip(node) {
    const heard = new Sentences();
    heard.skip(node.reply.text);
    this.#heard.set(node, heard);
    this.#notes.set(node, note(node.reply));
  }
}
