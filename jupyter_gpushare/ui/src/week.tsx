/** Usage in the last seven days: a sentence, and bars for each day on demand. */

import React from 'react';

import { Button } from './button';
import { daysOf, IDay } from './days';
import type { IHistory } from './wire';
import { weekday } from './locale';
import { daysText, gpuHours, weekText } from './messages';
import { trans } from './translate';

/** Width of each of a day's two bars, as a part of the day's width. */
const BAR = 0.38;

/** `now` is the time of the broker's clock, which determines the last day. */
export function Week({ week, now }: { week: IHistory; now: string }): JSX.Element {
  const [open, setOpen] = React.useState(false);
  return (
    <section>
      <h3>{trans.__('Last seven days')}</h3>
      <p>{weekText(week)}</p>
      {week.days.length > 0 && (
        <Button className="gpushare-link" aria-expanded={open} run={() => setOpen(!open)}>
          {open ? trans.__('Hide days') : trans.__('Show days')}
        </Button>
      )}
      {open && <Days days={daysOf(week, now)} />}
    </section>
  );
}

/** Used and lent GPU-hours of each day as two bars; the scale ends at the longest bar. */
function Days({ days }: { days: readonly IDay[] }): JSX.Element {
  const max = Math.max(1, ...days.flatMap(day => [day.usedGpuS, day.lentGpuS]));
  const bar = (kind: string, x: number, seconds: number): JSX.Element => (
    <rect key={kind} data-kind={kind} x={x} y={1 - seconds / max} width={BAR} height={seconds / max} />
  );
  return (
    <>
      <div className="gpushare-muted gpushare-parts" aria-hidden="true">
        <span>{trans.__('GPU-hours a day:')}</span>
        <span>
          <i className="gpushare-swatch" data-kind="used" />
          {trans.__('used')}
        </span>
        <span>
          <i className="gpushare-swatch" data-kind="lent" />
          {trans.__('given to others')}
        </span>
      </div>
      <div className="gpushare-axes gpushare-muted" role="img" aria-label={daysText(days)}>
        <svg className="gpushare-days" viewBox={`0 0 ${days.length} 1`} preserveAspectRatio="none">
          {days.map(({ day, usedGpuS, lentGpuS }, n) => (
            <g key={day}>
              {bar('used', n + 0.5 - BAR, usedGpuS)}
              {bar('lent', n + 0.5, lentGpuS)}
            </g>
          ))}
        </svg>
        <span>{gpuHours(max)}</span>
        <span>{gpuHours(0)}</span>
        <div className="gpushare-weekdays">
          {days.map(({ day }) => (
            <span key={day}>{weekday(day)}</span>
          ))}
        </div>
      </div>
    </>
  );
}
