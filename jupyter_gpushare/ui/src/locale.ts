/** Numbers and times in the reader's locale; the only module that uses it. */

/** `120`, `1,234.568`, `0.000123`: at most three decimal places; three significant digits below 1. */
export function numberText(value: number): string {
  const digits = Math.abs(value) < 1 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 3 };
  return value.toLocaleString([], digits);
}

/** `14:20`, or `14:20:07`, in the reader's locale; with the day unless it is today: `6 May, 14:20`. */
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

/** Returns an ISO 8601 time as text in a sentence, with seconds if it has them. */
export function isoText(at: string): string {
  return timeText(new Date(at), /T\d\d:\d\d:/.test(at));
}

/** `Tue`, or `Tue 6 May`: a day in UTC, in the reader's locale. */
export function weekday(day: string, date = false): string {
  return new Date(`${day}T00:00:00Z`).toLocaleDateString([], {
    weekday: 'short',
    timeZone: 'UTC',
    ...(date && { day: 'numeric', month: 'short' })
  });
}
