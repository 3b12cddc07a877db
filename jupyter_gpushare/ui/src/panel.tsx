/** The sidebar: state, sentence and actions; memory; projects; my jobs; events. */

import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import React from 'react';

import { Action, Actions } from './actions';
import { Button, useBusy } from './button';
import { byKernel, owner } from './kernels';
import { Meter, Sparkline } from './meter';
import { GpuState, phaseOf } from './state';
import { ISample } from './samples';
import { IJobLinks, Jobs } from './paneljobs';
import { WaitingSessions } from './waitingsessions';
import type { IPlace } from './sight';
import type { IGpuModel } from './tokens';
import { Week } from './week';
import { IDecision, IHistory, ILeaseStatus, IProcessUse, IProjectUse } from './wire';
import {
  memory,
  memoryText,
  projectParts,
  projectText,
  sentence
} from './messages';
import { timeText } from './locale';
import { trans } from './translate';

const SHOWN_EVENTS = 8;

const WEEK_EVERY_MS = 300_000;

/** Actions of the panel that need other parts of JupyterLab. */
export interface IPanelLinks {
  /** Frees the GPU memory of a kernel, after a confirmation. */
  readonly release: (lease: ILeaseStatus, process: IProcessUse) => Promise<void>;
  /** Asks for a size, then changes this server's GPU part or gets its first one. */
  readonly resize: (lease: ILeaseStatus | null) => Promise<void>;
  /** Opens the Hub control panel; null outside a Hub. */
  readonly hub: (() => void) | null;
  /** Null if the plugin of the jobs is disabled. */
  readonly jobs: IJobLinks | null;
}

export class GpuPanel extends ReactWidget {
  constructor(
    private readonly _gpu: IGpuModel,
    private readonly _actions: Actions,
    private readonly _links: () => IPanelLinks
  ) {
    super();
    _gpu.model.changed.connect(this._refreshWeek, this);
    this._place = _gpu.sentence.add('sidebar', this.node, () => this.isVisible);
    for (const sight of [_gpu.sentence, _gpu.reasons]) {
      sight.changed.connect(() => this.update(), this);
    }
    this.addClass('gpushare-panel');
    this.node.tabIndex = -1;
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('Shared GPU'));
  }

  override dispose(): void {
    this._place.dispose();
    super.dispose();
  }

  protected override onActivateRequest(): void {
    this.node.focus();
  }

  protected override onAfterShow(): void {
    this._refreshWeek();
  }

  /** Fetches the week's usage while the panel is visible: on state changes and every `WEEK_EVERY_MS`. */
  private _refreshWeek(): void {
    const now = Date.now();
    const state = this._gpu.model.state;
    if (!this.isVisible || state.kind !== 'ready' || this._isAsking) {
      return;
    }
    const states = [state.lease?.state, ...state.status.jobs.map(job => job.id + job.state)].join();
    if (states !== this._weekOf || now - this._weekAt > WEEK_EVERY_MS) {
      this._weekOf = states;
      this._weekAt = now;
      this._isAsking = true;
      this._gpu.requests
        .history()
        .then(week => {
          this._week = week;
          this.update();
        })
        .catch(() => undefined) // the rest of the panel shows whether the broker is unreachable
        .finally(() => (this._isAsking = false));
    }
  }

  protected override render(): JSX.Element {
    return (
      <UseSignal signal={this._gpu.model.changed}>{() => this._body(this._gpu.model.state)}</UseSignal>
    );
  }

  private _body(state: GpuState): JSX.Element {
    if (state.kind !== 'ready') {
      return (
        <>
          {this._sentence(state) ?? <span className="gpushare-badge">{trans.__('No data')}</span>}
          {state.kind === 'unreachable' && (
            <Button
              className="jp-Button jp-mod-styled jp-mod-minimal"
              run={() => void this._gpu.model.refresh()}
            >
              {trans.__('Ask again')}
            </Button>
          )}
        </>
      );
    }
    const { lease, status } = state;
    const hasReasons = this._gpu.reasons.place() === null;
    return (
      <>
        <section aria-label={trans.__('This server')}>
          {lease !== null && (
            <span className="gpushare-badge" data-phase={phaseOf(lease)}>
              {lease.badge}
            </span>
          )}
          {this._sentence(state)}
          {state.mayGain && (
            <Button
              className="jp-Button jp-mod-styled jp-mod-accept"
              title={trans.__('Get a part of a GPU for this server; its kernels go on')}
              run={() => void this._links().resize(null)}
            >
              {trans.__('Get a GPU')}
            </Button>
          )}
          {lease === null && !state.mayGain && this._links().hub !== null && (
            <button type="button" className="gpushare-link" onClick={() => this._links().hub?.()}>
              {trans.__('Hub control panel')}
            </button>
          )}
          {lease !== null && <ActionRow actions={this._actions.of(lease)} />}
          {lease !== null && (
            <Memory
              lease={lease}
              samples={this._gpu.model.samples.all}
              release={this._links().release}
            />
          )}
          {lease !== null && <TimeShare lease={lease} />}
          {lease !== null && (
            <Button
              className="gpushare-link"
              title={trans.__('Get a larger or smaller part of the GPU')}
              run={() => void this._links().resize(lease)}
            >
              {trans.__('Change size')}
            </Button>
          )}
          {!status.devices_known && (
            <p className="gpushare-muted">
              {trans.__('The GPU machine does not answer; memory figures may be old.')}
            </p>
          )}
        </section>
        {status.projects.map(project => (
          <Project key={project.name} project={project} />
        ))}
        <WaitingSessions sessions={status.waiting} hasReasons={hasReasons} />
        <Jobs
          jobs={status.jobs}
          hasReasons={hasReasons}
          links={this._links().jobs}
        />
        <Events events={status.events} />
        {this._week !== null && <Week week={this._week} now={status.at} />}
      </>
    );
  }

  /** The sentence, unless a more specific place shows it. */
  private _sentence(state: GpuState): JSX.Element | null {
    const place = this._gpu.sentence.place();
    return place === null || place === this._place ? <p role="status">{sentence(state)}</p> : null;
  }

  private readonly _place: IPlace;
  private _week: IHistory | null = null;
  private _weekAt = -Infinity;
  private _weekOf = '';
  private _isAsking = false;
}

/** The buttons for the current actions; all are off while one of the actions runs. */
export function ActionRow(props: { actions: readonly Action[] }): JSX.Element | null {
  const [busy, begin] = useBusy();
  if (props.actions.length === 0) {
    return null;
  }
  return (
    <div className="gpushare-actions">
      {props.actions.map(action => (
        <Button
          key={action.verb}
          className={`jp-Button jp-mod-styled ${action.accent ? 'jp-mod-accept' : 'jp-mod-reject'}`}
          title={action.caption}
          off={busy}
          run={() => begin(action.run)}
        >
          {action.label}
        </Button>
      ))}
    </div>
  );
}

function Memory(props: {
  lease: ILeaseStatus;
  samples: readonly ISample[];
  release: IPanelLinks['release'];
}): JSX.Element {
  const { lease, samples } = props;
  const text = memoryText(lease);
  const asleep = lease.memory_saved_bytes > 0;
  return (
    <>
      <div className="gpushare-row">
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
      <History lease={lease} samples={samples} />
      {!asleep &&
        byKernel(lease.processes).map(process => (
          <Process
            key={process.keeps ? 'left' : process.kernel_id || process.pid}
            process={process}
            {...props}
          />
        ))}
      <p className="gpushare-muted">
        {trans.__('%1 on %2, project %3', lease.size, lease.device_name, lease.project)}
      </p>
    </>
  );
}

/** The share of GPU time that this server got, with a mark at its granted share. */
function TimeShare({ lease }: { lease: ILeaseStatus }): JSX.Element | null {
  const { share, share_percent: granted, measured_share_percent: measured } = lease;
  if (share === '') {
    return null;
  }
  return (
    <>
      {granted !== null && measured !== null && (
        <>
          <div className="gpushare-row">
            <span>{trans.__('GPU time')}</span>
            <span>{trans.__('%1 %', Math.round(measured))}</span>
          </div>
          <Meter
            label={trans.__('GPU time')}
            text={trans.__('%1 %, %2 % granted', Math.round(measured), granted)}
            max={100}
            parts={[{ value: measured, kind: 'used' }]}
            mark={granted}
          />
        </>
      )}
      <p className="gpushare-muted">{share}</p>
    </>
  );
}

/** Utilization, if it is measured for this server alone. */
function History(props: {
  lease: ILeaseStatus;
  samples: readonly ISample[];
}): JSX.Element | null {
  const { lease, samples } = props;
  const utilization = lease.utilization_percent;
  if (utilization === null || samples.length < 2) {
    return null;
  }
  return (
    <figure className="gpushare-history">
      <figcaption className="gpushare-row">
        <span>{trans.__('GPU utilization')}</span>
        <span>{trans.__('%1 %', utilization)}</span>
      </figcaption>
      <div className="gpushare-axes gpushare-muted">
        <Sparkline
          samples={samples}
          text={trans.__('Utilization of the last ten minutes, now %1 %', utilization)}
        />
        <span aria-hidden="true">{trans.__('100 %')}</span>
        <span aria-hidden="true">{trans.__('0 %')}</span>
      </div>
      <div className="gpushare-row gpushare-muted" aria-hidden="true">
        <span>{trans.__('10 min ago')}</span>
        <span>{trans.__('now')}</span>
      </div>
    </figure>
  );
}

function Process(props: {
  process: IProcessUse;
  lease: ILeaseStatus;
  release: IPanelLinks['release'];
}): JSX.Element {
  const { process, lease } = props;
  const name = owner(process);
  const [busy, begin] = useBusy();
  return (
    <div className="gpushare-row gpushare-muted">
      {/* A name that ends in "(ended)" wraps instead of being cut. */}
      <span className={process.keeps ? '' : 'gpushare-name'} title={name}>
        {name}
      </span>
      <span>
        {memory(process.used_bytes)}
        {(process.keeps || process.kernel_id !== '') && (
          <Button
            className="gpushare-link"
            title={
              process.keeps
                ? trans.__('Free this GPU memory by ending the processes that keep it')
                : trans.__('Free its GPU memory by restarting the kernel')
            }
            aria-label={trans.__('Release the GPU memory of %1', name)}
            off={busy}
            run={() => begin(() => props.release(lease, process))}
          >
            {trans.__('Release')}
          </Button>
        )}
      </span>
    </div>
  );
}

function Project({ project }: { project: IProjectUse }): JSX.Element {
  const own = Math.max(0, project.in_use_milli - project.borrowed_milli);
  const text = projectText(project);
  return (
    <section>
      <h3>{trans.__('Project %1 (GPUs)', project.name)}</h3>
      <Meter
        label={trans.__('GPUs of project %1', project.name)}
        text={text}
        max={Math.max(project.quota_milli, project.in_use_milli + project.lent_milli)}
        parts={[
          { value: own, kind: 'used' },
          { value: project.borrowed_milli, kind: 'borrowed' },
          { value: project.lent_milli, kind: 'lent' }
        ]}
        mark={project.quota_milli}
      />
      <div className="gpushare-muted gpushare-parts" aria-hidden="true">
        {projectParts(project).map(part => (
          <span key={part.text}>
            {part.kind !== null && <i className="gpushare-swatch" data-kind={part.kind} />}
            {part.text}
          </span>
        ))}
      </div>
    </section>
  );
}

function Events({ events }: { events: readonly IDecision[] }): JSX.Element | null {
  const newest = [...events].sort((a, b) => b.seq - a.seq).slice(0, SHOWN_EVENTS);
  if (newest.length === 0) {
    return null;
  }
  return (
    <section>
      <h3>{trans.__('What happened')}</h3>
      <ul>
        {newest.map(event => (
          <li key={event.seq}>
            <time dateTime={event.at}>{timeText(new Date(event.at))}</time> {event.sentence}
          </li>
        ))}
      </ul>
    </section>
  );
}
