/** The sidebar: state, sentence and action; memory; projects; my jobs; what happened. */

import { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import React from 'react';

import { Action, Actions } from './actions';
import { ENDED, GpuModel, GpuState, phaseOf } from './model';
import { IDecision, IJob, ILease, IProject } from './wire';
import {
  clockTime,
  duration,
  gigabytes,
  jobBadge,
  memoryText,
  projectText,
  sentence
} from './words';

const SHOWN_JOBS = 5;
const SHOWN_EVENTS = 8;

export class GpuPanel extends ReactWidget {
  constructor(
    private readonly _model: GpuModel,
    private readonly _actions: Actions,
    private readonly _trans: TranslationBundle
  ) {
    super();
    this.addClass('gps-panel');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', _trans.__('Shared GPU'));
  }

  protected override render(): JSX.Element {
    return (
      <UseSignal signal={this._model.changed} initialArgs={this._model.state}>
        {(_, state) => this._body(state ?? this._model.state)}
      </UseSignal>
    );
  }

  private _body(state: GpuState): JSX.Element {
    const trans = this._trans;
    if (state.kind !== 'ready') {
      return (
        <>
          <p role="status">{sentence(trans, state)}</p>
          {state.kind === 'silent' && (
            <button
              className="jp-Button jp-mod-styled jp-mod-minimal"
              onClick={() => void this._model.refresh()}
            >
              {trans.__('Ask again')}
            </button>
          )}
        </>
      );
    }
    const { lease, status } = state;
    return (
      <>
        <section aria-label={trans.__('This server')}>
          {lease !== null && (
            <span className="gps-badge" data-phase={phaseOf(lease)}>
              {lease.badge}
            </span>
          )}
          <p role="status">{sentence(trans, state)}</p>
          {lease !== null && <ActionRow actions={this._actions.of(lease)} />}
          {lease !== null && <Memory lease={lease} trans={trans} />}
          {!status.devices_known && (
            <p className="gps-muted">
              {trans.__('The GPU machine does not answer; memory figures may be old.')}
            </p>
          )}
        </section>
        {status.projects.map(project => (
          <Project key={project.name} project={project} trans={trans} />
        ))}
        <Jobs jobs={status.jobs} trans={trans} />
        <Events events={status.events} trans={trans} />
      </>
    );
  }
}

/** The buttons for what can be done now; none while one of them is under way. */
export function ActionRow(props: { actions: readonly Action[] }): JSX.Element | null {
  const [busy, setBusy] = React.useState(false);
  const run = async (action: Action): Promise<void> => {
    setBusy(true);
    await action.run();
    setBusy(false);
  };
  if (props.actions.length === 0) {
    return null;
  }
  return (
    <div className="gps-actions">
      {props.actions.map(action => (
        <button
          key={action.verb}
          className={`jp-Button jp-mod-styled ${action.accent ? 'jp-mod-accept' : 'jp-mod-reject'}`}
          title={action.caption}
          disabled={busy}
          onClick={() => void run(action)}
        >
          {action.label}
        </button>
      ))}
    </div>
  );
}

function Meter(props: {
  label: string;
  text: string;
  max: number;
  parts: readonly { value: number; kind: string }[];
}): JSX.Element {
  const max = Math.max(props.max, 1);
  const total = props.parts.reduce((sum, part) => sum + part.value, 0);
  return (
    <div
      className="gps-meter"
      role="meter"
      aria-label={props.label}
      aria-valuemin={0}
      aria-valuemax={max}
      aria-valuenow={Math.min(total, max)}
      aria-valuetext={props.text}
    >
      {props.parts.map(part => (
        <span
          key={part.kind}
          data-kind={part.kind}
          style={{ width: `${Math.min(100, (100 * part.value) / max)}%` }}
        />
      ))}
    </div>
  );
}

function Memory(props: { lease: ILease; trans: TranslationBundle }): JSX.Element {
  const { lease, trans } = props;
  const text = memoryText(trans, lease);
  const asleep = lease.memory_saved_bytes > 0;
  return (
    <>
      <div className="gps-row">
        <span>{trans.__('GPU memory')}</span>
        <span>{text}</span>
      </div>
      <Meter
        label={trans.__('GPU memory')}
        text={text}
        max={lease.memory_limit_bytes}
        parts={[
          {
            value: asleep ? lease.memory_saved_bytes : lease.memory_used_bytes,
            kind: asleep ? 'saved' : 'used'
          }
        ]}
      />
      {lease.processes.map(process => (
        <div className="gps-row gps-muted" key={process.pid}>
          <span className="gps-name">{process.kernel || process.name}</span>
          <span>{trans.__('%1 GB', gigabytes(process.used_bytes))}</span>
        </div>
      ))}
      <p className="gps-muted">
        {trans.__('%1 on %2, project %3', lease.size, lease.device_name, lease.project)}
        <br />
        {trans.__('Limit kept by: %1', levelText(trans, lease.level))}
      </p>
    </>
  );
}

function levelText(trans: TranslationBundle, level: string): string {
  switch (level) {
    case 'whole_gpu':
      return trans.__('whole devices');
    case 'mig':
      return trans.__('the hardware (MIG)');
    case 'cgroup':
      return trans.__('the driver');
    case 'preload':
      return trans.__('a library in each process, and a watchdog');
    case 'hints':
      return trans.__('nobody: frameworks are only asked');
    default:
      return level;
  }
}

function Project(props: { project: IProject; trans: TranslationBundle }): JSX.Element {
  const { project, trans } = props;
  const own = Math.max(0, project.in_use_milli - project.borrowed_milli);
  const text = projectText(trans, project);
  return (
    <section>
      <h3>{trans.__('Project %1', project.name)}</h3>
      <Meter
        label={trans.__('GPUs of project %1', project.name)}
        text={text}
        max={Math.max(project.quota_milli, project.in_use_milli + project.lent_milli)}
        parts={[
          { value: own, kind: 'used' },
          { value: project.borrowed_milli, kind: 'borrowed' },
          { value: project.lent_milli, kind: 'lent' }
        ]}
      />
      <p className="gps-muted">{text}</p>
    </section>
  );
}

function Jobs(props: { jobs: readonly IJob[]; trans: TranslationBundle }): JSX.Element {
  const { jobs, trans } = props;
  const first = [...jobs].sort((a, b) => Number(ENDED.has(a.state)) - Number(ENDED.has(b.state)));
  const more = jobs.length - SHOWN_JOBS;
  return (
    <section>
      <h3>{trans.__('My training jobs')}</h3>
      {jobs.length === 0 && (
        <p className="gps-muted">{trans.__('None. In a terminal: gpushare submit -- COMMAND')}</p>
      )}
      <ul>
        {first.slice(0, SHOWN_JOBS).map(job => (
          <li key={job.id} className="gps-job">
            <div className="gps-row">
              <b className="gps-name" title={job.id}>
                {job.name}
              </b>
              <span>{jobBadge(trans, job)}</span>
            </div>
            <div className="gps-muted">{job.reason}</div>
            <div className="gps-muted">
              {trans.__(
                '%1, waited %2, ran %3',
                job.size,
                duration(trans, job.waited_s),
                duration(trans, job.ran_s)
              )}
            </div>
            {job.done !== null && job.total !== null && job.total > 0 && (
              <Meter
                label={trans.__('Progress of %1', job.name)}
                text={trans.__('%1 of %2', job.done, job.total)}
                max={job.total}
                parts={[{ value: job.done, kind: 'used' }]}
              />
            )}
          </li>
        ))}
      </ul>
      {more > 0 && (
        <p className="gps-muted">
          {trans._n('%1 more job: gpushare jobs', '%1 more jobs: gpushare jobs', more)}
        </p>
      )}
    </section>
  );
}

function Events(props: {
  events: readonly IDecision[];
  trans: TranslationBundle;
}): JSX.Element | null {
  const newest = [...props.events].sort((a, b) => b.seq - a.seq).slice(0, SHOWN_EVENTS);
  if (newest.length === 0) {
    return null;
  }
  return (
    <section>
      <h3>{props.trans.__('What happened')}</h3>
      <ul>
        {newest.map(event => (
          <li key={event.seq}>
            <time dateTime={event.at}>{clockTime(new Date(event.at))}</time> {event.sentence}
          </li>
        ))}
      </ul>
    </section>
  );
}
