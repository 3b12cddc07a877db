/** All my training jobs, in the main area: a list for thousands of jobs, and one job in detail. */

import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import { ISignal, Signal } from '@lumino/signaling';
import React from 'react';

import { Button } from './button';
import { Column, JobsModel, Show, viewOf } from './jobs';
import { IDetailProps, JobDetail } from './jobdetail';
import { canBeMarked, Mark, MarkedJobs } from './jobmarks';
import type { IPlace } from './sight';
import type { IGpuModel } from './tokens';
import { IJob } from './wire';
import { duration, jobBadge, oneLine, progressAndTimeText, sentence } from './messages';
import { WaitingSessions } from './waitingsessions';
import { trans } from './translate';

/** All rows have this height, so that only those in sight are drawn. */
const ROW_PX = 44;
/** A list up to this width has higher rows, with three lines for reasons (`base.css` has both numbers). */
const [NARROW_PX, NARROW_ROW_PX] = [600, 76];
/** Rows drawn above and below those in sight. */
const EXTRA_ROWS = 8;
/** Keys that, with Alt, move a job in the queue. */
const STEPS: { readonly [key: string]: -1 | 1 } = { ArrowUp: -1, ArrowDown: 1 };

export interface IJobActions extends Omit<IDetailProps, 'job' | 'trans'> {
  /** Opens the dialog for a new job. */
  readonly submit: () => void;
}

export class JobList extends ReactWidget {
  constructor(
    private readonly _gpu: IGpuModel,
    private readonly _model: JobsModel,
    private readonly _actions: IJobActions,
  ) {
    super();
    this.addClass('gpushare-jobs');
    this._places = [
      _gpu.sentence.add('jobs', this.node, () => this.isVisible && _gpu.model.state.kind === 'unreachable'),
      _gpu.reasons.add('jobs', this.node, () => this.isVisible)
    ];
    void _model.refresh();
  }

  /** Selects a job. */
  select(job: string): void {
    this._selected = job;
    this._selectedChanged.emit();
  }

  override dispose(): void {
    this._model.dispose();
    this._places.forEach(place => place.dispose());
    super.dispose();
  }

  /** Moves the keyboard focus to the rows. */
  protected override onActivateRequest(): void {
    this.node.querySelector<HTMLElement>('.gpushare-job-row[tabindex="0"]')?.focus();
  }

  protected override render(): JSX.Element {
    return (
      <UseSignal signal={this._selectedChanged}>
        {() => (
          <UseSignal signal={this._model.changed}>{() => this._body()}</UseSignal>
        )}
      </UseSignal>
    );
  }

  private _body(): JSX.Element {
    const gpu = this._gpu.model.state;
    if (gpu.kind === 'unreachable') {
      const ask = (): void => void this._gpu.model.refresh();
      return <Empty text={sentence(gpu)} action={trans.__('Ask again')} run={ask} />;
    }
    return (
      <>
        {gpu.kind === 'ready' && (
          <WaitingSessions sessions={gpu.status.waiting} hasReasons={true} />
        )}
        {this._jobs()}
      </>
    );
  }

  private _jobs(): JSX.Element {
    const state = this._model.state;
    switch (state.kind) {
      case 'loading':
        return <Empty text={trans.__('Asking for your jobs.')} />;
      case 'refused':
        return (
          <Empty
            text={state.message}
            action={trans.__('Ask again')}
            run={() => void this._model.refresh()}
          />
        );
      case 'ready':
        if (state.jobs.length === 0) {
          return (
            <Empty
              text={trans.__(
                'No training jobs yet. A job runs a notebook or a script as soon as there is a GPU for it, and goes on when you close the browser.'
              )}
              action={trans.__('Run as training job')}
              run={this._actions.submit}
            />
          );
        }
        return this._list(viewOf(state.jobs, this._model.view), state.jobs.length);
    }
  }

  private _list(jobs: readonly IJob[], all: number): JSX.Element {
    const selected = this._selected === null ? null : this._model.job(this._selected);
    const marked = jobs.filter(job => this._marked.has(job.id) && canBeMarked(job));
    return (
      <>
        <Tools
          model={this._model}
          count={jobs.length}
          all={all}
          submit={this._actions.submit}
        >
          <MarkedJobs marked={marked} stops={this._actions.stops} />
        </Tools>
        <Rows
          jobs={jobs}
          model={this._model}
          selected={this._selected}
          select={id => this.select(id)}
          marked={new Set(marked.map(({ id }) => id))}
          toggle={this._toggle}
          move={this._actions.move}
        />
        {selected !== null && (
          <JobDetail key={selected.id} {...this._actions} job={selected} />
        )}
      </>
    );
  }

  /** Marks a job for actions on several jobs, or removes the mark. */
  private readonly _toggle = (id: string): void => {
    if (!this._marked.delete(id)) {
      this._marked.add(id);
    }
    this._selectedChanged.emit();
  };

  private readonly _places: readonly IPlace[];
  private readonly _marked = new Set<string>();
  private readonly _selectedChanged: Signal<this, void> & ISignal<this, void> = new Signal(this);
  private _selected: string | null = null;
}

function Empty(props: { text: string; action?: string; run?: () => void }): JSX.Element {
  const { action, run } = props;
  return (
    <div className="gpushare-empty">
      <p role="status">{props.text}</p>
      {action !== undefined && run !== undefined && (
        <Button className="jp-Button jp-mod-styled jp-mod-accept" run={run}>
          {action}
        </Button>
      )}
    </div>
  );
}

function Tools(props: {
  model: JobsModel;
  count: number;
  all: number;
  submit: () => void;
  children: React.ReactNode;
}): JSX.Element {
  const { model } = props;
  const { view } = model;
  const shows: [Show, string][] = [
    ['all', trans.__('All')],
    ['living', trans.__('Waiting or running')],
    ['ended', trans.__('Ended')],
    ['failed', trans.__('Failed')]
  ];
  return (
    <div className="gpushare-tools">
      <input
        type="search"
        className="jp-mod-styled"
        aria-label={trans.__('Filter jobs')}
        placeholder={trans.__('Filter')}
        value={view.text}
        onChange={event => (model.view = { ...view, text: event.target.value })}
      />
      <select
        aria-label={trans.__('Which jobs')}
        value={view.show}
        onChange={event => (model.view = { ...view, show: event.target.value as Show })}
      >
        {shows.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
      <span className="gpushare-muted" role="status">
        {props.count === props.all
          ? trans._n('%1 job', '%1 jobs', props.all)
          : trans.__('%1 of %2 jobs', props.count, props.all)}
      </span>
      {props.children}
      <button className="jp-Button jp-mod-styled jp-mod-accept" onClick={props.submit}>
        {trans.__('New job')}
      </button>
    </div>
  );
}

function Rows(props: {
  jobs: readonly IJob[];
  model: JobsModel;
  selected: string | null;
  select: (id: string) => void;
  marked: ReadonlySet<string>;
  toggle: (id: string) => void;
  move: (job: IJob, step: -1 | 1) => Promise<void>;
}): JSX.Element {
  const { jobs, selected, select } = props;
  const scroller = React.useRef<HTMLDivElement>(null);
  const [top, setTop] = React.useState(0);
  const { height, width } = useSize(scroller);
  const rowPx = width <= NARROW_PX ? NARROW_ROW_PX : ROW_PX;
  useFocusOn(selected, scroller);
  const at = jobs.findIndex(job => job.id === selected);
  // Keep the selected row in sight when the detail below takes some of the height.
  React.useLayoutEffect(() => {
    if (at !== -1) {
      showRow(scroller.current!, at, rowPx);
    }
  }, [height, rowPx]);
  const move = (to: number): void => {
    const n = Math.max(0, Math.min(jobs.length - 1, to));
    if (jobs[n] !== undefined) {
      select(jobs[n].id);
      showRow(scroller.current!, n, rowPx);
    }
  };
  return (
    <div className="gpushare-grid" role="grid" aria-label={trans.__('My training jobs')} aria-rowcount={jobs.length + 1}>
      <div className="gpushare-row-grid gpushare-head" role="row" aria-rowindex={1}>
        <Heads model={props.model} />
      </div>
      <div
        ref={scroller}
        className="gpushare-scroller"
        role="rowgroup"
        onScroll={event => setTop(event.currentTarget.scrollTop)}
        onKeyDown={event => {
          const job = jobs[Math.max(0, at)];
          const step = event.altKey ? STEPS[event.key] : undefined;
          if (job !== undefined && step !== undefined) {
            event.preventDefault();
            void props.move(job, step);
            return;
          }
          if (job !== undefined && event.key === ' ' && !(event.target instanceof HTMLInputElement)) {
            event.preventDefault();
            if (canBeMarked(job)) {
              props.toggle(job.id);
            }
            return;
          }
          const to = target(event.key, at, jobs.length, Math.max(1, Math.floor(height / rowPx) - 1));
          if (to !== undefined) {
            event.preventDefault();
            move(to);
          }
        }}
      >
        <div role="presentation" style={{ height: jobs.length * rowPx, position: 'relative' }}>
          {drawn(jobs.length, top, height, rowPx, Math.max(0, at)).map(n => (
            <Row
              key={jobs[n]!.id}
              job={jobs[n]!}
              n={n}
              px={rowPx}
              selected={n === at}
              reached={n === Math.max(0, at)}
              select={select}
              marked={props.marked.has(jobs[n]!.id)}
              toggle={props.toggle}
            />
          ))}
          {jobs.length === 0 && <p className="gpushare-muted gpushare-none">{trans.__('No job is like that.')}</p>}
        </div>
      </div>
    </div>
  );
}

/** The column headers: a click sorts by a column, a second click in the other direction. */
function Heads({ model }: { model: JobsModel }): JSX.Element {
  const { view } = model;
  const columns: [Column, string][] = [
    ['name', trans.__('Job')],
    ['state', trans.__('State')],
    ['size', trans.__('Size')],
    ['waited', trans.__('Waited')],
    ['ran', trans.__('Ran')],
    ['progress', trans.__('Progress')]
  ];
  return (
    <>
      {columns.map(([column, text]) => {
        const mine = view.column === column;
        return (
          <span
            key={column}
            role="columnheader"
            aria-sort={mine ? (view.descending ? 'descending' : 'ascending') : 'none'}
          >
            <button
              type="button"
              onClick={() => (model.view = { ...view, column, descending: mine && !view.descending })}
            >
              {text}
              {mine ? (view.descending ? ' \u25be' : ' \u25b4') : ''}
            </button>
          </span>
        );
      })}
    </>
  );
}

/** Returns the current size of an element. */
function useSize(element: React.RefObject<HTMLElement>): { height: number; width: number } {
  const [size, setSize] = React.useState({ height: 600, width: Infinity });
  React.useEffect(() => {
    const node = element.current!;
    const observer = new ResizeObserver(() => setSize({ height: node.clientHeight, width: node.offsetWidth }));
    observer.observe(node);
    return () => observer.disconnect();
  }, []);
  return size;
}

/** Moves the keyboard focus to the selected row, if it is in the list. */
function useFocusOn(selected: string | null, scroller: React.RefObject<HTMLElement>): void {
  React.useEffect(() => {
    const node = scroller.current!;
    const focused = document.activeElement;
    if (node.contains(focused) || focused === node.closest('[tabindex="-1"]')) {
      node.querySelector<HTMLElement>('.gpushare-job-row[tabindex="0"]')?.focus({ preventScroll: true });
    }
  }, [selected]);
}

/** Returns the row that a key selects from row `at` (-1 is none); undefined for other keys. */
function target(key: string, at: number, rows: number, page: number): number | undefined {
  const rowOf: { [key: string]: number } = {
    ArrowDown: at + 1,
    ArrowUp: Math.max(0, at - 1),
    PageDown: at + page,
    PageUp: at - page,
    Home: 0,
    End: rows - 1
  };
  return rowOf[key];
}

/** Scrolls as little as needed to show a row. */
function showRow(scroller: HTMLElement, n: number, rowPx: number): void {
  const y = n * rowPx;
  if (y < scroller.scrollTop) {
    scroller.scrollTop = y;
  } else if (y + rowPx > scroller.scrollTop + scroller.clientHeight) {
    scroller.scrollTop = y + rowPx - scroller.clientHeight;
  }
}

/** Returns the rows to draw: those in sight, and the one that the keyboard reaches. */
function drawn(rows: number, top: number, height: number, rowPx: number, reached: number): number[] {
  const first = Math.max(0, Math.floor(top / rowPx) - EXTRA_ROWS);
  const last = Math.min(rows, Math.ceil((top + height) / rowPx) + EXTRA_ROWS);
  const found = Array.from({ length: Math.max(0, last - first) }, (_, n) => first + n);
  return reached < rows && !found.includes(reached) ? [...found, reached] : found;
}

const Row = React.memo(function Row(props: IRowProps): JSX.Element {
  const { job, n } = props;
  const progress = progressAndTimeText(job);
  return (
    <div
      className="gpushare-row-grid gpushare-job-row"
      role="row"
      aria-rowindex={n + 2}
      aria-selected={props.selected}
      aria-keyshortcuts="Space Alt+ArrowUp Alt+ArrowDown"
      tabIndex={props.reached ? 0 : -1}
      data-job={job.id}
      style={{ transform: `translateY(${n * props.px}px)`, height: props.px }}
      onClick={() => props.select(job.id)}
    >
      <span role="gridcell" className="gpushare-job-name" title={job.id}>
        <Mark job={job} marked={props.marked} toggle={props.toggle} />
        <b>{job.name}</b>
        {/* The reason of the selected job is in the detail below. */}
        <small className="gpushare-reason" title={job.reason}>
          {(props.selected ? '' : oneLine(job.reason)) || job.project}
        </small>
      </span>
      <span role="gridcell" className="gpushare-state" data-state={job.state}>
        {jobBadge(job)}
      </span>
      <span role="gridcell" title={job.size}>
        {job.size}
      </span>
      <span role="gridcell">{duration(job.waited_s)}</span>
      <span role="gridcell">{job.started_at === null ? '' : duration(job.ran_s)}</span>
      <span role="gridcell" title={progress}>
        {progress}
      </span>
    </div>
  );
}, sameRow);

interface IRowProps {
  readonly job: IJob;
  readonly n: number;
  readonly px: number;
  readonly selected: boolean;
  readonly reached: boolean;
  readonly marked: boolean;
  readonly select: (id: string) => void;
  readonly toggle: (id: string) => void;
}

/** Returns whether two rows look the same: each answer has new objects, which need no new drawing. */
function sameRow(a: IRowProps, b: IRowProps): boolean {
  const keys = ['id', 'name', 'state', 'shared', 'reason', 'position', 'waited_s', 'ran_s', 'done', 'total'] as const;
  const same = a.n === b.n && a.px === b.px && a.selected === b.selected && a.reached === b.reached && a.marked === b.marked;
  return same && keys.every(key => a.job[key] === b.job[key]);
}
