/** Numbers and times as the reader's place writes them; the only module that asks how. */

/** `120`, `1,234.568`, `0.000123`: at most three digits behind the point, or three that count. */
export function numberText(value: number): string {
  const digits = Math.abs(value) < 1 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 3 };
  return value.toLocaleString([], digits);
}

/** `14:20`, or `14:20:07`, as the reader's place writes it; another day than today is there too: `6 May, 14:20`. */
export function timeText(moment: Date, seconds = false, now = new Date()): string {
  const time = {
    hour: 'numeric',
    minute: '2-digit',
    second: seconds ? '2-digit' : undefined
  } as const;
  if (moment.toDateString() === now.toDateString()) {
    return moment.toLocaleTimeString([], time);
  }
  const isThisYear = moment.getFullYear() === now.getFullYear();
  return moment.toLocaleString([], {
    ...time,
    day: 'numeric',
    month: 'short',
    year: isThisYear ? undefined : 'numeric'
  });
}

/** Returns a time in a sentence (ISO 8601), with seconds where it has them. */
export function isoText(at: string): string {
  return timeText(new Date(at), /T\d\d:\d\d:/.test(at));
}

/** `Tue`, or `Tue 6 May`: a day in UTC, as people here write it. */
export function weekday(day: string, date = false): string {
  return new Date(`${day}T00:00:00Z`).toLocaleDateString([], {
    weekday: 'short',
    timeZone: 'UTC',
    ...(date && { day: 'numeric', month: 'short' })
  });
}
