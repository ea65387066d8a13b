// A growing text to whole sentences, for readers who listen. Pure.

// A sentence ends at its mark before white space, or where a line ends; a lone number ("1.") is no sentence.
const END = /(?:[.!?…。！？]["'”’)\]]*(?=\s)|[。！？]|\n)/g;
const NUMBER = /(?:^|\s)\d+\.$/;
const MARKS = /^[ \t|:-]*--[ \t|:-]*$|^\s{0,3}(?:#{1,6}\s+|>\s?|[-*+]\s+|```.*$)|[*_`~]{1,3}|\|/gm;
const LINK = /!?\[([^\]]*)\]\([^)\s]*\)/g;

/** What Markdown's marks leave when it is read out. */
export const spokenText = (markdown) => markdown.replace(LINK, "$1").replace(MARKS, "").replace(/\s+/g, " ").trim();

export class Sentences {
  #from = 0;

  /** The sentences that became whole since the last call, in one string; `last`: nothing more will come. */
  take(text, last = false) {
    if (text.length < this.#from) this.#from = 0;
    const rest = text.slice(this.#from);
    const end = last ? rest.length : lastEnd(rest);
    this.#from += end;
    return spokenText(rest.slice(0, end));
  }

  /** Everything so far has been heard. */
  skip(text) {
    this.#from = text.length;
  }
}

function lastEnd(text) {
  let end = 0;
  for (const match of text.matchAll(END)) {
    const here = match.index + match[0].length;
    if (!NUMBER.test(text.slice(Math.max(0, here - 12), here))) end = here;
  }
  return end;
}
