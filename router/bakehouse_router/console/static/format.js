// Numbers as people read them.

/** A count with separators. */
export function count(n) {
  return n.toLocaleString("en");
}

/** A rate; "–" where none is known. */
export function rate(perSecond) {
  if (perSecond === null) return "–";
  return perSecond < 10 ? perSecond.toFixed(1) : count(Math.round(perSecond));
}

/** Seconds, short ones in milliseconds. */
export function duration(seconds) {
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`;
}

/** A share, such as 0.25, as a percentage; "–" of nothing. */
export function share(part, whole) {
  return whole === 0 ? "–" : `${Math.round((100 * part) / whole)} %`;
}

/** "1 token", "2 tokens". */
export function counted(n, noun) {
  return `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
}
