/** The days of a week, for the bars that show them. */

import type { IHistory } from './wire';

export const WEEK_DAYS = 7;

/** GPU time used and lent on one day, in all projects together. */
export interface IDay {
  /** `2031-05-06`, in UTC like the broker's days. */
  readonly day: string;
  readonly usedGpuS: number;
  readonly lentGpuS: number;
}

/** Returns the seven days up to that of `now` (ISO, UTC), oldest first; a day without use has zeros. */
export function daysOf(week: IHistory, now: string): IDay[] {
  const today = Date.parse(`${now.slice(0, 10)}T00:00:00Z`);
  return Array.from({ length: WEEK_DAYS }, (_, index) => {
    const day = new Date(today - (WEEK_DAYS - 1 - index) * 86_400_000).toISOString().slice(0, 10);
    const uses = week.days.filter(use => use.day === day);
    return {
      day,
      usedGpuS: uses.reduce((sum, use) => sum + use.used_gpu_s, 0),
      lentGpuS: uses.reduce((sum, use) => sum + use.lent_gpu_s, 0)
    };
  });
}
