/** One job in detail: its facts, actions, log, and a timeline with the reason of every pause. */

import { UseSignal } from '@jupyterlab/ui-components';
import React from 'react';

import { Button, useBusy } from './button';
import { isInOrder } from './jobs';
import { keepReading, Log } from './log';
import type { Requests } from './requests';
import { ENDED } from './state';
import { Stops } from './stops';
import { chosenVariables } from './launch';
import { IJob, IJobMoment } from './wire';
import { duration, environmentText, jobBadge, momentText, oneLine, sharedText } from './messages';
import { timeText } from './locale';
import { trans } from './translate';

/** At most this distance from the end counts as the end, because scroll positions may be fractional. */
const END_PX = 4;
const MAY_PRINT: ReadonlySet<string> = new Set(['starting', 'running', 'stopping']);

export interface IDetailProps {
  readonly job: IJob;
  readonly stops: Stops;
  readonly retry: (job: IJob) => Promise<void>;
  /** Opens the dialog that changes a job in the queue. */
  readonly edit: (job: IJob) => void;
  /** Returns my job before (-1) or behind (1) it in the queue. */
  readonly neighbour: (job: IJob, step: -1 | 1) => IJob | null;
  /** Moves a job by one place among my jobs. */
  readonly move: (job: IJob, step: -1 | 1) => Promise<void>;
  readonly duplicate: (job: IJob) => void;
  /** Opens the notebook that the job writes. */
  readonly openOutput: (path: string) => void;
  readonly requests: Pick<Requests, 'log' | 'logUrl' | 'timeline'>;
}

export function JobDetail(props: IDetailProps): JSX.Element {
  const { job } = props;
  const [tab, setTab] = React.useState<'log' | 'timeline' | 'about'>('log');
  const tabs = [
    ['log', trans.__('Log')],
    ['timeline', trans.__('Timeline')],
    ['about', trans.__('About')]
  ] as const;
  return (
    <section className="gpushare-detail" aria-label={trans.__('Job %1', job.name)}>
      <header>
        <h2>{job.name}</h2>
        <span className="gpushare-state" data-state={job.state}>
          {jobBadge(job)}
        </span>
        <Buttons {...props} />
      </header>
      <p role="status">{job.reason}</p>
      <div
        className="gpushare-tabs"
        role="tablist"
        onKeyDown={event => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          if (step !== undefined) {
            const at = tabs.findIndex(([key]) => key === tab);
            const [next] = tabs[(at + step + tabs.length) % tabs.length]!;
            setTab(next);
            event.currentTarget.querySelector<HTMLElement>(`#gpushare-tab-${next}`)?.focus();
          }
        }}
      >
        {tabs.map(([key, text]) => (
          <button
            key={key}
            role="tab"
            type="button"
            id={`gpushare-tab-${key}`}
            aria-selected={tab === key}
            aria-controls="gpushare-tabpanel"
            tabIndex={tab === key ? 0 : -1}
            onClick={() => setTab(key)}
          >
            {text}
          </button>
        ))}
      </div>
      <div className="gpushare-tabpanel" id="gpushare-tabpanel" role="tabpanel" aria-labelledby={`gpushare-tab-${tab}`}>
        {tab === 'log' && <LogView {...props} />}
        {tab === 'timeline' && <Timeline {...props} />}
        {tab === 'about' && <About {...props} />}
      </div>
    </section>
  );
}

function Buttons(props: IDetailProps): JSX.Element {
  const { job } = props;
  const [busy, begin] = useBusy();
  const button = (label: string, run: () => void, off = false): JSX.Element => (
    <Button className="jp-Button jp-mod-styled jp-mod-reject" off={off || busy} run={run}>
      {label}
    </Button>
  );
  const output = job.source?.output ?? '';
  const isOver = ENDED.has(job.state);
  // Every button keeps its place, so that a second click never hits another button.
  return (
    <span className="gpushare-actions">
      <UseSignal signal={props.stops.changed}>
        {() =>
          button(
            trans.__('Stop'),
            () => void props.stops.stop(job),
            isOver || job.state === 'stopping' || props.stops.isStopping(job)
          )
        }
      </UseSignal>
      {button(trans.__('Retry'), () => begin(() => props.retry(job)), !isOver)}
      {button(trans.__('Duplicate'), () => props.duplicate(job))}
      {output !== '' &&
        button(trans.__('Open output'), () => props.openOutput(output), job.started_at === null)}
      {job.state === 'queued' && button(trans.__('Change…'), () => props.edit(job))}
      {isInOrder(job) && (
        <>
          {button(trans.__('Move up'), () => begin(() => props.move(job, -1)), props.neighbour(job, -1) === null)}
          {button(trans.__('Move down'), () => begin(() => props.move(job, 1)), props.neighbour(job, 1) === null)}
        </>
      )}
    </span>
  );
}

function LogView(props: IDetailProps): JSX.Element {
  const { job } = props;
  const [attempt, setAttempt] = React.useState(0);
  const [follow, setFollow] = React.useState(true);
  const [query, setQuery] = React.useState('');
  const box = React.useRef<HTMLPreElement>(null);
  const { log, reads, refusal } = useLog(props, attempt, box);
  const onScroll = useEnd(box, follow && query === '', [log, reads], setFollow);
  const kept = log.kept ?? [];
  const found = log.find(query);
  return (
    <>
      <div className="gpushare-tools">
        <label>
          <input type="checkbox" checked={follow} onChange={event => setFollow(event.target.checked)} />
          {trans.__('Follow')}
        </label>
        <Search
          query={query}
          found={found.length}
          change={setQuery}
          show={n => box.current?.querySelectorAll('mark')[n]?.scrollIntoView({ block: 'nearest' })}
        />
        {kept.length > 1 && <Attempts kept={kept} attempt={attempt} change={setAttempt} />}
        {kept.length > 0 && (
          <a className="gpushare-link" href={props.requests.logUrl(job.id, attempt)} download>
            {trans.__('Download')}
          </a>
        )}
      </div>
      {refusal !== '' && <p role="alert">{refusal}</p>}
      {log.lack !== '' && <p role="status">{log.lack}</p>}
      <pre
        ref={box}
        className="gpushare-log"
        role="log"
        // Screen readers do not read it out as it grows.
        aria-live="off"
        tabIndex={0}
        aria-label={trans.__('Log of %1', job.name)}
        onScroll={onScroll}
      >
        {log.isCut && <i>{trans.__('The beginning is left out here; the download has all that is kept.')}{'\n'}</i>}
        {log.lines.length === 0 && <i>{emptyText(job, log.kept)}</i>}
        {query === '' ? log.lines.join('\n') : <Marked lines={log.lines} found={new Set(found)} />}
      </pre>
    </>
  );
}

/** Reads the log of an attempt while it is shown; `reads` counts the pieces. */
function useLog(
  { job, requests }: IDetailProps,
  attempt: number,
  box: React.RefObject<HTMLElement>
): { log: Log; reads: number; refusal: string } {
  const [refusal, setRefusal] = React.useState('');
  const [reads, setRead] = React.useState(0);
  const log = React.useMemo(
    () => new Log((n, from) => requests.log(job.id, n, from), attempt),
    [job.id, attempt]
  );
  React.useEffect(
    () =>
      keepReading(log, {
        // Neither the page nor the tab is hidden.
        isSeen: () => document.visibilityState === 'visible' && box.current?.offsetParent !== null,
        grows: MAY_PRINT.has(job.state),
        onRead: (isMore, error) => {
          setRefusal(error);
          setRead(n => (isMore ? n + 1 : n));
        }
      }),
    [log, job.state]
  );
  return { log, reads, refusal };
}

/**
 * Keeps the end of a box in sight when its `content` changes, while it `follows`.
 * Returns the handler of scroll events, with which a user stops or resumes following.
 */
function useEnd(
  box: React.RefObject<HTMLElement>,
  follows: boolean,
  content: readonly unknown[],
  setFollow: (follow: boolean) => void
): () => void {
  const seen = React.useRef({ scrollTop: 0, clientHeight: 0, scrollHeight: 0 });
  const settle = (): void => {
    const { current } = box;
    if (follows) {
      current!.scrollTop = current!.scrollHeight;
    }
    const { scrollTop, clientHeight, scrollHeight } = current!;
    // A position that we did not set is a user's; keep ours until its scroll event arrives.
    seen.current = { scrollTop: follows ? scrollTop : seen.current.scrollTop, clientHeight, scrollHeight };
  };
  // Runs before the drawing, so no scroll event comes between new text and this.
  React.useLayoutEffect(settle, [follows, ...content]);
  React.useLayoutEffect(() => {
    // A new size, or a tab that is shown again, changes the position.  The observer also calls once at its
    // start, when a user may have scrolled already.
    let { clientWidth, clientHeight } = box.current!;
    const observer = new ResizeObserver(() => {
      const { current } = box;
      if (current!.clientWidth !== clientWidth || current!.clientHeight !== clientHeight) {
        ({ clientWidth, clientHeight } = current!);
        settle();
      }
    });
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, [follows]);
  return () => {
    const { scrollTop, clientHeight, scrollHeight } = box.current!;
    const before = seen.current;
    seen.current = { scrollTop, clientHeight, scrollHeight };
    // The event comes with the next frame.  If the height has changed since, the user did not choose the position.
    const isSame = clientHeight === before.clientHeight && scrollHeight === before.scrollHeight;
    if (isSame && scrollTop !== before.scrollTop) {
      setFollow(scrollTop + clientHeight >= scrollHeight - END_PX);
    }
  };
}

function Search(props: {
  query: string;
  /** Number of lines with the text. */
  found: number;
  change: (query: string) => void;
  /** Scrolls to one of these lines. */
  show: (n: number) => void;
}): JSX.Element {
  const { query, found } = props;
  const [at, setAt] = React.useState(0);
  const next = (step: number): void => {
    if (found > 0) {
      const to = (at + step + found) % found;
      setAt(to);
      props.show(to);
    }
  };
  return (
    <>
      <input
        type="search"
        className="jp-mod-styled"
        aria-label={trans.__('Search the log')}
        placeholder={trans.__('Search')}
        value={query}
        onChange={event => {
          props.change(event.target.value);
          setAt(0);
        }}
        onKeyDown={event => event.key === 'Enter' && next(event.shiftKey ? -1 : 1)}
      />
      {query !== '' && (
        <span className="gpushare-muted" role="status">
          {trans._n('%1 line', '%1 lines', found)}
        </span>
      )}
    </>
  );
}

function Attempts(props: {
  kept: readonly number[];
  attempt: number;
  change: (attempt: number) => void;
}): JSX.Element {
  return (
    <select
      aria-label={trans.__('Attempt')}
      value={props.attempt}
      onChange={event => props.change(Number(event.target.value))}
    >
      <option value={0}>{trans.__('Newest attempt')}</option>
      {props.kept.map(n => (
        <option key={n} value={n}>
          {trans.__('Attempt %1', n)}
        </option>
      ))}
    </select>
  );
}

function emptyText(job: IJob, kept: readonly number[] | null): string {
  if (job.started_at === null) {
    return trans.__('It has not started yet.');
  }
  if (kept === null) {
    return '';
  }
  return kept.length === 0
    ? trans.__('Its log is not in your files any more.')
    : trans.__('It has printed nothing yet.');
}

function Marked(props: { lines: readonly string[]; found: ReadonlySet<number> }): JSX.Element {
  return (
    <>
      {props.lines.map((line, n) =>
        props.found.has(n) ? <mark key={n}>{`${line}\n`}</mark> : `${line}\n`
      )}
    </>
  );
}

function Timeline(props: IDetailProps): JSX.Element {
  const { job } = props;
  const [moments, setMoments] = React.useState<readonly IJobMoment[] | string | null>(null);
  React.useEffect(() => {
    let over = false;
    props.requests
      .timeline(job.id)
      .then(({ moments }) => !over && setMoments(moments))
      .catch(error => !over && setMoments(error instanceof Error ? error.message : String(error)));
    return () => {
      over = true;
    };
  }, [job.id, job.state, job.attempt, job.preemptions, job.shared]);
  if (moments === null || typeof moments === 'string') {
    return <p role="status">{moments ?? trans.__('Asking.')}</p>;
  }
  return (
    <ol className="gpushare-timeline">
      {moments.map((moment, n) => (
        <li key={n} data-what={moment.what}>
          <time dateTime={moment.at}>{timeText(new Date(moment.at), true)}</time>
          <b>{momentText(moment.what)}</b>
          <span>{oneLine(moment.sentence)}</span>
        </li>
      ))}
    </ol>
  );
}

function About(props: IDetailProps): JSX.Element {
  const { job } = props;
  const parameters = Object.entries(job.source?.parameters ?? {});
  const facts: [string, string][] = [
    [trans.__('Id'), job.id],
    [trans.__('Project'), job.project],
    [trans.__('Size'), job.size],
    [trans.__('Submitted'), timeText(new Date(job.submitted_at))],
    [trans.__('Waited'), duration(job.waited_s)],
    [trans.__('Ran'), duration(job.ran_s)],
    [trans.__('Maximum run time'), job.max_run_s === null ? '' : duration(job.max_run_s)],
    [trans.__('Paused'), trans._n('%1 time', '%1 times', job.preemptions)],
    [trans.__('Shares its GPU'), sharedText(job)],
    [trans.__('Started'), job.attempt === 0 ? trans.__('not yet') : trans._n('%1 time', '%1 times', job.attempt)],
    [trans.__('Environment'), environmentText(job)],
    [trans.__('Parameters'), parameters.map(([name, value]) => `${name} = ${value}`).join(', ')],
    [trans.__('Folder'), job.cwd ?? ''],
    [trans.__('Variables'), chosenVariables(job).join(', ')],
    [trans.__('Command'), job.command.join(' ')]
  ];
  return (
    <dl className="gpushare-facts">
      {facts
        .filter(([, value]) => value !== '')
        .map(([label, value]) => (
          <React.Fragment key={label}>
            <dt>{label}</dt>
            <dd>{value}</dd>
          </React.Fragment>
        ))}
    </dl>
  );
}
