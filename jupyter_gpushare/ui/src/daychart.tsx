/**
 * Chart of used and lent GPU-hours per day, as pairs of bars.  The only module that
 * imports uPlot; loaded on demand.
 */

import type { ISignal } from '@lumino/signaling';
import React from 'react';
import uPlot from 'uplot';

import type { IDay } from './days';
import { weekday } from './locale';
import { daysText } from './messages';

const HEIGHT = 120;
/** Share of the width of a day, for each of its two bars. */
const BAR = 0.38;

/** Emitted when the colours have become others. */
export type ThemeChanged = ISignal<unknown, unknown>;

export interface IDayChartProps {
  readonly days: readonly IDay[];
  readonly themeChanged: ThemeChanged | null;
}

/** Drawn as wide as its element; while that is hidden there is no chart. */
export function DayChart(props: IDayChartProps): JSX.Element {
  const { days, themeChanged } = props;
  const host = React.useRef<HTMLDivElement>(null);
  React.useEffect(() => {
    const node = host.current!;
    let plot: uPlot | null = null;
    const fit = (): void => {
      const width = node.clientWidth;
      if (width === 0) {
        plot?.destroy();
        plot = null;
      } else if (plot === null) {
        plot = make(node, days, width);
      } else if (plot.width !== width) {
        plot.setSize({ width, height: HEIGHT });
      }
    };
    const redraw = (): void => plot?.redraw();
    const observer = new ResizeObserver(fit);
    observer.observe(node);
    themeChanged?.connect(redraw);
    fit();
    return () => {
      themeChanged?.disconnect(redraw);
      observer.disconnect();
      plot?.destroy();
    };
  }, [days, themeChanged]);
  return <div className="gpushare-days" ref={host} role="img" aria-label={daysText(days)} />;
}

function make(host: HTMLElement, days: readonly IDay[], width: number): uPlot {
  const { fontFamily, fontSize } = getComputedStyle(host);
  const font = `${fontSize} ${fontFamily}`;
  const colour = (name: string) => () => getComputedStyle(host).getPropertyValue(name).trim();
  const text = colour('--jp-ui-font-color1');
  const line = { stroke: colour('--jp-border-color2'), width: 1 };
  const bars = (name: string, align: 1 | -1): uPlot.Series => ({
    fill: colour(name),
    width: 0,
    points: { show: false },
    paths: uPlot.paths.bars!({ size: [BAR], align })
  });
  const positions = days.map((_, index) => index);
  const options: uPlot.Options = {
    width,
    height: HEIGHT,
    padding: [8, 0, 0, 0],
    cursor: { show: false },
    legend: { show: false },
    scales: {
      x: { time: false, range: () => [-0.5, days.length - 0.5] },
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
        values: () => days.map(({ day }) => weekday(day))
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
      days.map(day => hours(day.usedGpuS)),
      days.map(day => hours(day.lentGpuS))
    ],
    host
  );
}
