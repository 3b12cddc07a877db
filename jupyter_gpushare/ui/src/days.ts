/** A week by day, as its bars show it. */

import type { IHistory } from './wire';

export const WEEK_DAYS = 7;

/** What was used and given to others, of all projects together. */
export interface IDay {
  /** `2031-05-06`, in UTC as the broker counts. */
  readonly day: string;
  readonly usedGpuS: number;
  readonly lentGpuS: number;
}

/** Returns the seven days that end with the day of `now` (ISO, UTC), oldest first; those without use are 0. */
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
