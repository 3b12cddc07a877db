/** Usage of the last seven days: a sentence, and a chart that is loaded on demand. */

import type { ISignal } from '@lumino/signaling';
import React from 'react';

import { Button } from './button';
import type { DayChart } from './daychart';
import { daysOf, IDay } from './days';
import type { IHistory } from './wire';
import { daysText, weekText } from './messages';
import { trans } from './translate';

/** Emitted when the colours have become others. */
export type ThemeChanged = ISignal<unknown, unknown>;

interface IWeekProps {
  readonly week: IHistory;
  /** The broker's clock: which day is the last. */
  readonly now: string;
  readonly themeChanged: ThemeChanged | null;
}

export function Week(props: IWeekProps): JSX.Element {
  const { week } = props;
  const [open, setOpen] = React.useState(false);
  const today = props.now.slice(0, 10);
  const days = React.useMemo(() => daysOf(week, today), [week, today]);
  return (
    <section>
      <h3>{trans.__('Last seven days')}</h3>
      <p>{weekText(week)}</p>
      {week.days.length > 0 && (
        <Button className="gpushare-link" aria-expanded={open} run={() => setOpen(!open)}>
          {open ? trans.__('Hide days') : trans.__('Show days')}
        </Button>
      )}
      {open && <Days days={days} themeChanged={props.themeChanged} />}
    </section>
  );
}

type Make = (host: HTMLElement) => DayChart;

function Days(props: {
  days: readonly IDay[];
  themeChanged: ThemeChanged | null;
}): JSX.Element {
  const [make, setMake] = React.useState<Make | 'loading' | 'failed'>('loading');
  React.useEffect(() => {
    let here = true;
    if (make === 'loading') {
      import('./daychart').then(
        ({ DayChart }) => here && setMake(() => (host: HTMLElement) => new DayChart(host)),
        () => here && setMake('failed')
      );
    }
    return () => {
      here = false;
    };
  }, [make]);
  if (make === 'failed') {
    return (
      <>
        <p role="alert">{trans.__('The chart could not be loaded.')}</p>
        <Button className="jp-Button jp-mod-styled jp-mod-minimal" run={() => setMake('loading')}>
          {trans.__('Try again')}
        </Button>
      </>
    );
  }
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
      {make === 'loading' ? (
        <p className="gpushare-days gpushare-muted" role="status">
          {trans.__('Loading the chart.')}
        </p>
      ) : (
        <Chart {...props} make={make} />
      )}
    </>
  );
}

function Chart(props: {
  make: Make;
  days: readonly IDay[];
  themeChanged: ThemeChanged | null;
}): JSX.Element {
  const { make, days, themeChanged } = props;
  const host = React.useRef<HTMLDivElement>(null);
  const chart = React.useRef<DayChart | null>(null);
  React.useEffect(() => {
    const mine = (chart.current = make(host.current!));
    const redraw = (): void => mine.redraw();
    themeChanged?.connect(redraw);
    return () => {
      themeChanged?.disconnect(redraw);
      mine.dispose();
    };
  }, [make, themeChanged]);
  React.useEffect(() => chart.current!.show(days), [make, themeChanged, days]);
  return <div className="gpushare-days" ref={host} role="img" aria-label={daysText(days)} />;
}
