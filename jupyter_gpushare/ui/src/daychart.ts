/**
 * Chart of used and lent GPU-hours per day, as pairs of bars.  The only module that
 * imports uPlot; loaded on demand.
 */

import type { IDisposable } from '@lumino/disposable';
import uPlot from 'uplot';

import type { IDay } from './days';
import { weekday } from './locale';

const HEIGHT = 120;
/** Share of the width of a day, for each of its two bars. */
const BAR = 0.38;

/** Drawn as wide as `host`; while that is hidden there is no chart. */
export class DayChart implements IDisposable {
  constructor(private readonly _host: HTMLElement) {
    this._observer = new ResizeObserver(() => this._fit());
    this._observer.observe(_host);
  }

  get isDisposed(): boolean {
    return this._disposed;
  }

  show(days: readonly IDay[]): void {
    this._days = days;
    this._drop();
    this._fit();
  }

  /** Draws again, in the colours of now. */
  redraw(): void {
    this._plot?.redraw();
  }

  dispose(): void {
    this._disposed = true;
    this._observer.disconnect();
    this._drop();
  }

  private _fit(): void {
    const width = this._host.clientWidth;
    if (width === 0 || this._disposed) {
      this._drop();
    } else if (this._plot === null) {
      this._plot = this._make(width);
    } else if (this._plot.width !== width) {
      this._plot.setSize({ width, height: HEIGHT });
    }
  }

  private _drop(): void {
    this._plot?.destroy();
    this._plot = null;
  }

  private _make(width: number): uPlot {
    const { fontFamily, fontSize } = getComputedStyle(this._host);
    const font = `${fontSize} ${fontFamily}`;
    const colour = (name: string) => () => getComputedStyle(this._host).getPropertyValue(name).trim();
    const text = colour('--jp-ui-font-color1');
    const line = { stroke: colour('--jp-border-color2'), width: 1 };
    const bars = (name: string, align: 1 | -1): uPlot.Series => ({
      fill: colour(name),
      width: 0,
      points: { show: false },
      paths: uPlot.paths.bars!({ size: [BAR], align })
    });
    const positions = this._days.map((_, index) => index);
    const options: uPlot.Options = {
      width,
      height: HEIGHT,
      padding: [8, 0, 0, 0],
      cursor: { show: false },
      legend: { show: false },
      scales: {
        x: { time: false, range: () => [-0.5, this._days.length - 0.5] },
        y: { range: (_, __, most) => [0, most > 0 ? most : 1] }
      },
      axes: [
        {
          stroke: text,
          font,
          size: 22,
          gap: 4,
          grid: { show: false },
          ticks: { show: false },
          splits: () => positions,
          values: () => this._days.map(({ day }) => weekday(day))
        },
        {
          stroke: text,
          font,
          size: (_, values) => 8 + 7 * Math.max(1, ...(values ?? []).map(value => value.length)),
          gap: 4,
          space: 28,
          grid: line,
          ticks: { show: false }
        }
      ],
      series: [{}, bars('--jp-brand-color1', -1), bars('--jp-info-color2', 1)]
    };
    const hours = (seconds: number): number => seconds / 3600;
    return new uPlot(
      options,
      [
        positions,
        this._days.map(day => hours(day.usedGpuS)),
        this._days.map(day => hours(day.lentGpuS))
      ],
      this._host
    );
  }

  private readonly _observer: ResizeObserver;
  private _days: readonly IDay[] = [];
  private _plot: uPlot | null = null;
  private _disposed = false;
}
