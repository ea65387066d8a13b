// One conversation as the page keeps it: turns in order, saved after each change so that a reload goes on where it was.
import { isOver, newReply } from "./reply.js";

const PLACE = "chorus.talk.v1";
const TURNS_MAX = 200; // kept in this browser; the server has the whole history

export class Talk {
  constructor(storage) {
    this.storage = storage;
    this.turns = this.#load();
  }

  #load() {
    try {
      const turns = JSON.parse(this.storage.getItem(PLACE) ?? "[]");
      return Array.isArray(turns) ? turns : [];
    } catch {
      return [];
    }
  }

  save() {
    this.storage.setItem(PLACE, JSON.stringify(this.turns.slice(-TURNS_MAX)));
  }

  clear() {
    this.turns = [];
    this.save();
  }

  /** A new turn: what the user wrote, and the reply to come. The send key stays the same however often it is sent. */
  add(text, model, sendKey) {
    const turn = { text, model, sendKey, previous: this.lastReplyId(), reply: newReply() };
    this.turns.push(turn);
    this.save();
    return turn;
  }

  lastReplyId() {
    return this.turns.findLast((turn) => turn.reply.id)?.reply.id ?? null;
  }

  /** The turn whose reply was being written when the page was left. */
  unfinished() {
    const last = this.turns.at(-1);
    return last && !isOver(last.reply) ? last : null;
  }
}
