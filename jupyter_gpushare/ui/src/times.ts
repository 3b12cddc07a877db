/** Durations as people type them: `90 s`, `30 min`, `4 h`, `2 d`; also `1.5h`. */

const DURATION = /^(\d+(?:\.\d+)?)\s*(s|min|m|h|d)$/;
const SECONDS: { readonly [unit: string]: number } = { s: 1, m: 60, min: 60, h: 3600, d: 86_400 };
const UNITS = ['d', 'h', 'min'] as const;

/** Returns the seconds of a text; null: it is no duration. */
export function secondsOf(text: string): number | null {
  const found = DURATION.exec(text.trim());
  return found === null ? null : Number(found[1]) * SECONDS[found[2]!]!;
}

/** Returns a text that `secondsOf` reads as these seconds; empty for null. */
export function durationOf(seconds: number | null): string {
  if (seconds === null) {
    return '';
  }
  const unit = UNITS.find(each => seconds >= SECONDS[each]! && seconds % SECONDS[each]! === 0) ?? 's';
  return `${seconds / SECONDS[unit]!} ${unit}`;
}
