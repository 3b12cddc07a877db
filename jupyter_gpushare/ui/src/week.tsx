/** Usage of the last seven days: a sentence, and a chart that is loaded on demand. */

import React from 'react';

import { Button } from './button';
import type { IDayChartProps, ThemeChanged } from './daychart';
import { daysOf } from './days';
import type { IHistory } from './wire';
import { weekText } from './messages';
import { trans } from './translate';

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

function Days(props: IDayChartProps): JSX.Element {
  const [Chart, setChart] = React.useState<React.ComponentType<IDayChartProps> | 'loading' | 'failed'>('loading');
  React.useEffect(() => {
    if (Chart === 'loading') {
      import('./daychart').then(
        ({ DayChart }) => setChart(() => DayChart),
        () => setChart('failed')
      );
    }
  }, [Chart]);
  if (Chart === 'failed') {
    return (
      <>
        <p role="alert">{trans.__('The chart could not be loaded.')}</p>
        <Button className="jp-Button jp-mod-styled jp-mod-minimal" run={() => setChart('loading')}>
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
      {Chart === 'loading' ? (
        <p className="gpushare-days gpushare-muted" role="status">
          {trans.__('Loading the chart.')}
        </p>
      ) : (
        <Chart {...props} />
      )}
    </>
  );
}
