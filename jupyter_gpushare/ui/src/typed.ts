/** Parsing of typed text: lines, durations, sizes.  No widgets here. */

import { GPUS, MEMORY } from './sizes';
import { ISizeRequest } from './wire';

/** `90 s`, `30 min`, `4 h`, `2 d`; also `1.5h`. */
const DURATION = /^(\d+(?:\.\d+)?)\s*(s|min|m|h|d)$/;
const SECONDS: { readonly [unit: string]: number } = { s: 1, m: 60, min: 60, h: 3600, d: 86_400 };
const UNITS = ['d', 'h', 'min'] as const;

/** Returns the seconds of a duration as typed; null if it is none. */
export function secondsOf(text: string): number | null {
  const found = DURATION.exec(text.trim());
  return found === null ? null : Number(found[1]) * SECONDS[found[2]!]!;
}

/** Returns the text from which `secondsOf` reads these seconds; empty for null. */
export function durationOf(seconds: number | null): string {
  if (seconds === null) {
    return '';
  }
  const unit = UNITS.find(each => seconds >= SECONDS[each]! && seconds % SECONDS[each]! === 0) ?? 's';
  return `${seconds / SECONDS[unit]!} ${unit}`;
}

/** Returns `name = value` lines. */
export function lines(pairs: { readonly [name: string]: string }): string {
  return Object.entries(pairs)
    .map(([name, value]) => `${name} = ${value}`)
    .join('\n');
}

/** Returns the pairs of `name = value` lines; null if a line is malformed. */
export function pairsOf(text: string): { [name: string]: string } | null {
  const pairs: { [name: string]: string } = {};
  for (const line of nonEmpty(text)) {
    // A Python name, in any script.
    const match = /^([\p{XIDS}_]\p{XIDC}*)\s*=\s*(.*)$/u.exec(line);
    if (match === null) {
      return null;
    }
    pairs[match[1]!] = match[2]!;
  }
  return pairs;
}

/** Returns the lines that have text, trimmed. */
export function nonEmpty(text: string): string[] {
  return text
    .split('\n')
    .map(line => line.trim())
    .filter(line => line !== '');
}

/** Returns the request for a size as typed; null if it is none. */
export function sizeOf(text: string, borrow: boolean, project: string | null): ISizeRequest | null {
  const size = text.replace(/\s/g, '');
  if (GPUS.test(size)) {
    return { gpus: size, memory: null, borrow, project };
  }
  // A number without a unit is a number of GPUs.
  return MEMORY.test(size) && /[a-z]/i.test(size) ? { gpus: null, memory: size, borrow, project } : null;
}
