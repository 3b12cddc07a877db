/** Utilization of the last ten minutes, in at most `MAX_SAMPLES`, for any poll interval. */

export interface ISample {
  /** In milliseconds. */
  readonly at: number;
  /** Also 0 if not measured: asleep, or on a shared device (NVML reports utilization per device). */
  readonly percent: number;
}

const WINDOW_MS = 600_000;
const MAX_SAMPLES = 300;

export class Samples {
  get all(): readonly ISample[] {
    return this._samples;
  }

  /** Adds a sample; it replaces the last one if that is too recent. */
  add(sample: ISample): void {
    const before = this._samples[this._samples.length - 2];
    const kept = before !== undefined && sample.at - before.at < WINDOW_MS / MAX_SAMPLES ? -1 : undefined;
    this._samples = this._samples
      .slice(0, kept)
      .filter(old => sample.at - old.at <= WINDOW_MS)
      .concat(sample);
  }

  clear(): void {
    this._samples = [];
  }

  private _samples: readonly ISample[] = [];
}

/**
 * Returns the points of an SVG polyline, newest at the right edge of `width`.
 * A gap (the page was hidden) is a straight line.
 */
export function points(samples: readonly ISample[], width: number, height: number): string {
  const newest = samples[samples.length - 1]?.at ?? 0;
  return samples
    .map(({ at, percent }) => {
      const x = width * (1 - (newest - at) / WINDOW_MS);
      const y = height * (1 - percent / 100);
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    })
    .join(' ');
}
