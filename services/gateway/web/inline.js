// The inside of a Markdown paragraph to plain objects. Pure, and linear in the text's length.
//
//   a string   {mark: "strong" | "em" | "del", kids}   {mark: "code", text}   {mark: "link", href, kids}   {mark: "break"}

const FRAMES_MAX = 32; // marks inside one another; more are text
const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };
const SPECIAL = /[\\`*_~[\]!&<\n]/g;
const TARGET = /\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/y;
const HALF_TARGET = /\([^\s()]*$/y;
const ENTITY = /&(amp|lt|gt|quot|nbsp|#39);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', nbsp: "\u00a0", "#39": "'" };
const BREAK_TAG = /<br ?\/?>/iy;
const URLS = /\bhttps?:\/\/[^\s<>"'`]+/gi;
const WORD = /[\p{L}\p{N}]/u;

/** The address when a reader may safely follow it, or null. */
export function safeHref(address) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

/** `open`: the text is still being written, and what is unclosed at its end will be closed. */
export function inline(text, open = false) {
  return withAddresses(new Scanner(text, open).run());
}

/** The words of inline objects, as they are read out. */
export function plain(nodes) {
  return nodes.map((node) => (typeof node === "string" ? node : node.mark === "break" ? "\n" : (node.text ?? plain(node.kids)))).join("");
}

class Scanner {
  constructor(text, open) {
    this.text = text;
    this.open = open;
    this.at = 0;
    this.frames = [{ mark: null, kids: [] }]; // what is open, outermost first; a frame is {mark, kids}
    this.counts = {}; // how many frames have each mark
    this.unclosed = new Set(); // lengths of backtick runs that have no partner further on
  }

  run() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const next = SPECIAL.exec(this.text)?.index ?? this.text.length;
      this.#add(this.text.slice(this.at, next));
      this.at = next;
      if (next < this.text.length) this.#special(this.text[next]);
    }
    while (this.frames.length > 1) this.#finish();
    return this.frames[0].kids;
  }

  #special(char) {
    if (char === "\n") this.#put({ mark: "break" }, 1);
    else if (char === "\\") this.#escape();
    else if (char === "`") this.#code();
    else if (char === "[") this.#push("[");
    else if (char === "]") this.#link();
    else if (char === "!") this.text[this.at + 1] === "[" ? (this.at += 1) : this.#literal(1); // an image is shown as a link
    else if (char === "&") this.#pattern(ENTITY, (match) => this.#add(ENTITIES[match[1]]));
    else if (char === "<") this.#pattern(BREAK_TAG, () => this.#node({ mark: "break" }));
    else this.#run(char);
  }

  #pattern(regex, take) {
    regex.lastIndex = this.at;
    const match = regex.exec(this.text);
    if (!match) return this.#literal(1);
    take(match);
    this.at += match[0].length;
  }

  #escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") return this.#put({ mark: "break" }, 2);
    if (next === undefined || !/[!-/:-@[-`{-~]/.test(next)) return this.#literal(1);
    this.#add(next);
    this.at += 2;
  }

  #code() {
    const length = runLength(this.text, this.at);
    const from = this.at + length;
    const end = this.unclosed.has(length) ? -1 : closingRun(this.text, from, length);
    if (end >= 0) return this.#put({ mark: "code", text: codeText(this.text.slice(from, end)) }, end + length - this.at);
    this.unclosed.add(length);
    if (!this.open) return this.#literal(length);
    const rest = this.text.slice(from).replace(/`+$/, "");
    this.at = this.text.length;
    if (rest) this.#node({ mark: "code", text: rest.replaceAll("\n", " ") });
  }

  /** A run of * or _ or ~: closes what it can, opens with what is left. */
  #run(char) {
    const { text } = this;
    let left = runLength(text, this.at);
    const [before, after] = [text[this.at - 1] ?? " ", text[this.at + left] ?? " "];
    const inWord = char === "_" && WORD.test(before) && WORD.test(after);
    const closes = /\S/.test(before) && !inWord;
    const opens = /\S/.test(after) && !inWord;
    const last = this.at + left === text.length;
    this.at += left;
    while (left > 0) {
      const closing = closes ? this.#topmost(char, left) : null;
      const size = closing ? closing.length : char === "~" ? 2 : Math.min(left, 2);
      if (closing) this.#close(closing);
      else if (opens && size <= left) this.#push(char.repeat(size), 0);
      else {
        if (!(this.open && last)) this.#add(char.repeat(left));
        return;
      }
      left -= size;
    }
  }

  /** The innermost open mark of `char` that is at most `size` long, or null. */
  #topmost(char, size) {
    const marks = [char, char + char].filter((mark) => mark in MARKS && mark.length <= size && this.counts[mark]);
    if (!marks.length) return null;
    return this.frames.findLast((frame) => marks.includes(frame.mark)).mark;
  }

  #close(mark) {
    while (this.frames.at(-1).mark !== mark) this.#flatten();
    const { kids } = this.#pop();
    this.#node({ mark: MARKS[mark], kids });
  }

  #link() {
    if (!this.counts["["]) return this.#literal(1);
    while (this.frames.at(-1).mark !== "[") this.#flatten();
    this.at += 1;
    TARGET.lastIndex = HALF_TARGET.lastIndex = this.at;
    const target = TARGET.exec(this.text);
    const href = target && safeHref(target[1]);
    if (href) {
      this.#node({ mark: "link", href, kids: this.#pop().kids });
      this.at += target[0].length;
    } else if (this.open && HALF_TARGET.test(this.text)) {
      this.#pop().kids.forEach((kid) => this.#node(kid));
      this.at = this.text.length;
    } else {
      this.#flatten();
      this.#add("]");
    }
  }

  /** The end of the text: an open mark is closed while the text is written, and was only text when it is whole. */
  #finish() {
    const { mark, kids } = this.frames.at(-1);
    if (!this.open || mark === "[" || !kids.length) return this.#flatten();
    this.#close(mark);
  }

  #push(mark, length = mark.length) {
    if (this.frames.length > FRAMES_MAX) this.#add(mark);
    else this.#open(mark);
    this.at += length;
  }

  #open(mark) {
    this.frames.push({ mark, kids: [] });
    this.counts[mark] = (this.counts[mark] ?? 0) + 1;
  }

  #pop() {
    const frame = this.frames.pop();
    this.counts[frame.mark] -= 1;
    return frame;
  }

  /** The innermost frame was no mark after all: its characters are text. */
  #flatten() {
    const { mark, kids } = this.#pop();
    this.#add(mark);
    for (const kid of kids) this.#node(kid);
  }

  #literal(length) {
    this.#add(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  #put(node, length) {
    this.#node(node);
    this.at += length;
  }

  #node(node) {
    if (typeof node === "string") this.#add(node);
    else this.frames.at(-1).kids.push(node);
  }

  #add(text) {
    const { kids } = this.frames.at(-1);
    if (!text) return;
    if (typeof kids.at(-1) === "string") kids[kids.length - 1] += text;
    else kids.push(text);
  }
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** Where a run of exactly `length` backticks begins, or -1. */
function closingRun(text, from, length) {
  for (let at = text.indexOf("`", from); at >= 0; ) {
    const found = runLength(text, at);
    if (found === length) return at;
    at = text.indexOf("`", at + found);
  }
  return -1;
}

function codeText(text) {
  const line = text.replaceAll("\n", " ");
  return line.length > 2 && line.startsWith(" ") && line.endsWith(" ") && line.trim() ? line.slice(1, -1) : line;
}

/** Bare addresses become links, outside of links; a link inside a link becomes its text. */
function withAddresses(nodes) {
  return nodes.flatMap((node) => {
    if (typeof node === "string") return addresses(node);
    if (node.mark === "link") return [{ ...node, kids: withoutLinks(node.kids) }];
    return [node.kids ? { ...node, kids: withAddresses(node.kids) } : node];
  });
}

function withoutLinks(nodes) {
  return nodes.flatMap((node) => {
    if (typeof node === "string" || !node.kids) return [node];
    const kids = withoutLinks(node.kids);
    return node.mark === "link" ? kids : [{ ...node, kids }];
  });
}

function addresses(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(URLS)) {
    let address = match[0].replace(/[.,;:!?*_]+$/, "");
    if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
    const href = safeHref(address);
    if (!href) continue;
    if (match.index > from) found.push(text.slice(from, match.index));
    found.push({ mark: "link", href, kids: [address] });
    from = match.index + address.length;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}
