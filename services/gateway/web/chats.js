// All conversations of this person as the page has them: the list, the one that is open, and the replies being written.
// No DOM. `changed(what, node)` is called with "list", "thread", "reply" (of that node) or "connection".
import { ApiError } from "./api.js";
import { Follower } from "./follow.js";
import { failed, isOver, newReply, stopped } from "./reply.js";
import { Tree } from "./tree.js";

const FOLLOWED_MAX = 4; // a browser opens six connections to one server
const PENDING = "chorus.pending"; // a message that may not have reached the server yet; survives a reload of this tab
const TITLE_CHARS = 60;

export class Chats {
  list = [];
  more = false;
  search = "";
  tree = new Tree();
  loading = false;
  unread = new Set();
  #followers = new Map(); // node -> Follower
  #trees = new Map(); // conversation id -> Tree, of those in which a reply is being written
  #lost = new Set();
  #asked = 0; // the newest search wins
  #opened = 0; // the newest click wins

  constructor({ api, storage, channel, changed }) {
    Object.assign(this, { api, storage, channel, changed });
    channel?.addEventListener("message", () => this.refresh().catch(() => {}));
  }

  get connected() {
    return this.#lost.size === 0;
  }

  writing(id) {
    return [...this.#followers.keys()].some((node) => this.#followers.get(node).tree.id === id);
  }

  /** The reply being written in the open conversation, or null. */
  get current() {
    const running = [...this.#followers].filter(([node, { tree, stopping }]) => tree === this.tree && !isOver(node.reply) && !stopping);
    return running.at(-1)?.[0] ?? null;
  }

  // --- the list ---

  async find(search = this.search) {
    this.search = search;
    const asked = (this.#asked += 1);
    const page = await this.api.conversations({ search });
    if (asked !== this.#asked) return;
    this.#show(page.data, page.has_more);
  }

  async findMore() {
    const asked = this.#asked;
    const page = await this.api.conversations({ search: this.search, after: this.list.at(-1)?.id });
    if (asked !== this.#asked) return;
    const have = new Set(this.list.map((each) => each.id));
    this.#show([...this.list, ...page.data.filter((each) => !have.has(each.id))], page.has_more);
  }

  #show(list, more = this.more) {
    this.list = list;
    this.more = more;
    this.tree.entry = list.find((each) => each.id === this.tree.id) ?? this.tree.entry;
    this.changed("list");
  }

  /** The open conversation as the server names it, in the list or not: a search may have left it out. */
  get entry() {
    return this.tree.entry;
  }

  // --- the open conversation ---

  /** Shows a conversation, or an empty new one. Replies being written elsewhere go on. */
  async open(id = null) {
    const opened = (this.#opened += 1);
    this.unread.delete(id);
    this.tree = this.#trees.get(id) ?? new Tree(id);
    this.tree.entry ??= this.list.find((each) => each.id === id) ?? null;
    this.loading = id !== null && !this.#trees.has(id);
    this.changed("thread");
    if (id === null || this.#hasDraft(this.tree)) return;
    const { tree } = this;
    try {
      const [items, entry] = await Promise.all([this.api.items(id), tree.entry ?? this.api.conversation(id)]);
      if (opened !== this.#opened) return;
      this.loading = false;
      tree.entry ??= entry;
      this.#merge(tree, items);
    } finally {
      if (opened === this.#opened) this.loading = false;
    }
    this.changed("thread");
  }

  /** Looks for what other tabs and devices did meanwhile. */
  async refresh() {
    const { tree } = this;
    await this.find();
    if (tree.id && !this.loading) await this.#catchUp(tree);
  }

  async #catchUp(tree) {
    if (this.#hasDraft(tree)) return;
    const items = await this.api.items(tree.id);
    if (this.#hasDraft(tree)) return;
    this.#merge(tree, items);
    if (tree === this.tree) this.changed("thread");
  }

  /** Before a reply's id is known, the server's items cannot be told from the page's own. */
  #hasDraft(tree) {
    return tree.running().some((node) => !node.reply.id);
  }

  #merge(tree, items) {
    const fresh = !tree.root.children.length;
    tree.merge(items, (node) => this.#followers.has(node));
    if (fresh) tree.activate(items);
    for (const node of tree.running()) if (!this.#followers.has(node)) this.#follow(tree, node, null);
  }

  // --- what a person does ---

  /** A message under `parent`, a reply or the root of the open conversation. Returns the reply's node, or throws a sentence. */
  send(text, model, parent = this.tree.leaf()) {
    this.#room();
    const { tree } = this;
    const at = parent.role === "user" ? parent.parent : parent;
    return this.#write(tree, tree.send(at, text), model, crypto.randomUUID());
  }

  /** The message again with other words: a branch beside it. */
  edit(message, text, model) {
    return this.send(text, model, message.parent);
  }

  /** Another reply to `message`; a reply that never reached the server is asked for again in its place. */
  regenerate(message, model) {
    const last = message.children.at(-1);
    if (isOver(last.reply) && !last.reply.id) return this.again(last, model);
    this.#room();
    return this.#write(this.tree, this.tree.regenerate(message), model, crypto.randomUUID());
  }

  /** A reply that failed, once more: in its place when the server never had it. */
  again(node, model) {
    if (node.reply.id) return this.regenerate(node.parent, model);
    this.#room();
    node.reply = newReply();
    return this.#write(this.tree, node, model, node.sendKey);
  }

  stop() {
    if (!this.current) return;
    this.#followers.get(this.current).stop();
    this.changed("thread");
  }

  /** Shows another branch, here and (once it is stored) on every device. */
  choose(node) {
    this.tree.choose(node);
    this.changed("thread");
    const head = this.tree.known(this.tree.leaf());
    if (this.tree.id && head) this.api.change(this.tree.id, { head }).catch(() => {});
  }

  async rename(id, title) {
    const changed = await this.api.change(id, { title });
    if (this.tree.id === id) this.tree.entry = changed;
    this.#show(this.list.map((each) => (each.id === id ? { ...each, ...changed } : each)));
  }

  async remove(id) {
    await this.api.remove(id);
    for (const [node, follower] of this.#followers) if (follower.tree.id === id) this.#forget(node);
    this.#trees.delete(id);
    this.list = this.list.filter((each) => each.id !== id);
    this.channel?.postMessage({ id });
    if (this.tree.id === id) this.open(null);
    this.changed("list");
  }

  /** Sends once more what a reload may have cut off; the same key makes sure that it is written once. */
  resumePending() {
    const pending = JSON.parse(this.storage.getItem(PENDING) ?? "null");
    if (!pending || pending.conversation !== this.tree.id) return null;
    const parent = pending.follows ? this.tree.byReply(pending.follows) : this.tree.root;
    this.storage.removeItem(PENDING);
    if (!parent || parent.children.some((node) => node.text === pending.text)) return null;
    return this.#write(this.tree, this.tree.send(parent, pending.text), pending.model, pending.sendKey);
  }

  /** Another key: nothing of this person may stay. */
  close() {
    for (const node of this.#followers.keys()) this.#forget(node);
    this.storage.removeItem(PENDING);
  }

  // --- writing ---

  #room() {
    const elsewhere = new Set([...this.#followers.values()].map((follower) => follower.tree));
    elsewhere.delete(this.tree);
    if (elsewhere.size >= FOLLOWED_MAX) {
      throw new ApiError(`${elsewhere.size} replies are being written in other chats. Wait for one, or stop it.`, 0);
    }
  }

  /** Asks for the reply of `node`: with its message, or when that is known already, for another reply to it. */
  #write(tree, node, model, sendKey) {
    node.sendKey = sendKey;
    const turn = tree.turn ?? Promise.resolve(); // one after the other, so that the newest press is the newest reply
    let known;
    tree.turn = new Promise((resolve) => (known = resolve));
    const start = (signal, follower) => this.#start({ tree, node, model, sendKey, turn, signal, follower });
    this.#follow(tree, node, start, known);
    this.changed("thread");
    return node;
  }

  async *#start({ tree, node, model, sendKey, turn, signal, follower }) {
    await turn;
    if (follower.stopping) return void (node.reply = stopped(node.reply)); // nobody has heard of it yet
    const message = node.parent;
    const replyId = message.children.find((other) => other !== node && other.reply.id)?.reply.id;
    if (replyId) return yield* this.api.regenerate({ conversation: tree.id, replyId, model, sendKey, signal });
    const follows = tree.known(message.parent);
    const pend = () => this.#pend({ conversation: tree.id, text: message.text, follows, model, sendKey });
    pend();
    if (!tree.id) await this.#create(tree, message.text);
    pend();
    yield* this.api.send({ conversation: tree.id, follows, model, text: message.text, sendKey, signal });
  }

  async #create(tree, text) {
    const made = await this.api.create();
    tree.id = made.id;
    tree.entry = { ...made, title: text.slice(0, TITLE_CHARS) };
    this.#trees.set(tree.id, tree);
    this.#show([tree.entry, ...this.list]);
    if (tree === this.tree) this.changed("opened");
  }

  #pend(pending) {
    this.storage.setItem(PENDING, JSON.stringify(pending));
  }

  async #follow(tree, node, start, known = () => {}) {
    const changed = () => {
      if (node.reply.id) this.#known(tree, node, known);
      this.changed("reply", node);
    };
    const follower = new Follower({ api: this.api, node, start, changed, lost: (lost) => this.#connection(follower, lost) });
    follower.tree = tree;
    this.#followers.set(node, follower);
    if (tree.id) this.#trees.set(tree.id, tree);
    try {
      await follower.run();
    } catch (error) {
      this.#failed(node, error);
    }
    known();
    this.#done(tree, node);
  }

  /** The reply has its id: it is in the server's hands, and any older one of this conversation has ended for it. */
  #known(tree, node, known) {
    known();
    if (node.seen) return;
    node.seen = true;
    if (node.sendKey) {
      this.storage.removeItem(PENDING);
      this.channel?.postMessage({ id: tree.id });
    }
    for (const [other, follower] of this.#followers) {
      if (follower.tree !== tree || other === node || !other.seen || !node.sendKey) continue;
      other.reply = { ...other.reply, status: "over", end: "superseded", queue: null };
      follower.letGo();
    }
  }

  #failed(node, error) {
    const wait = error.retryAfterS ? Date.now() + error.retryAfterS * 1000 : null;
    node.reply = failed(node.reply, error.message, wait);
    if (!node.reply.id) this.storage.removeItem(PENDING);
  }

  #done(tree, node) {
    if (!this.#followers.delete(node)) return;
    if (!this.writing(tree.id)) this.#trees.delete(tree.id);
    if (tree !== this.tree && tree.id) this.unread.add(tree.id);
    if (tree === this.tree) this.changed("ended", node);
    this.changed("list");
    this.channel?.postMessage({ id: tree.id });
    if (!tree.id || this.writing(tree.id)) return;
    this.find().catch(() => {});
    if (tree === this.tree) this.#catchUp(tree).catch(() => {}); // the texts as they were stored
  }

  #forget(node) {
    const follower = this.#followers.get(node);
    this.#followers.delete(node);
    follower.letGo();
  }

  #connection(follower, lost) {
    const before = this.connected;
    if (lost) this.#lost.add(follower);
    else this.#lost.delete(follower);
    if (before !== this.connected) this.changed("connection");
  }
}

