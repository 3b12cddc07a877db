/** Notifications before and after a suspension, and a banner above every open notebook. */

import { Notification } from '@jupyterlab/apputils';
import { NotebookPanel } from '@jupyterlab/notebook';
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import React from 'react';

import { Actions, buttonOf } from './actions';
import { Notice, phaseOf } from './state';
import { ActionRow } from './panel';
import type { IPlace } from './sight';
import type { IGpuModel } from './tokens';
import type { ILeaseStatus } from './wire';
import { noticeText, wakingStep } from './messages';
import { trans } from './translate';

const MIN_PX = 40;
const PADDING_PX = 10;
const TOASTS = {
  warned: { type: 'warning', autoClose: false, hasActions: true },
  asleep: { type: 'info', autoClose: 8000, hasActions: true },
  waking: { type: 'info', autoClose: 8000, hasActions: false },
  lost: { type: 'error', autoClose: false, hasActions: false },
  back: { type: 'success', autoClose: 4000, hasActions: false }
} as const;
const BANNER_PHASES: ReadonlySet<string> = new Set(['warned', 'falling-asleep', 'asleep', 'waking', 'lost']);

/** Shows a notification for each notice, at most one about a lease at a time. */
export class Toasts {
  constructor(
    private readonly _gpu: IGpuModel,
    private readonly _actions: Actions,
    private readonly _openJob: (job?: string) => void
  ) {
    _gpu.model.changed.connect(() => this._follow());
    _gpu.sentence.changed.connect(() => this._follow());
  }

  show(notice: Notice): void {
    if (notice.kind === 'jobs') {
      Notification.info(noticeText(notice), {
        autoClose: 8000,
        actions: [{ label: trans.__('Show jobs'), callback: () => this._openJob() }]
      });
      return;
    }
    if (notice.kind === 'job-ended' || notice.kind === 'job-paused') {
      const type = { failed: 'warning', timed_out: 'warning', succeeded: 'success' } as const;
      const state = notice.job.state as keyof typeof type;
      Notification.emit(noticeText(notice), type[state] ?? 'info', {
        autoClose: 8000,
        actions: [
          {
            label: trans.__('Show job'),
            caption: trans.__('Show its log and its timeline'),
            callback: () => this._openJob(notice.job.id)
          }
        ]
      });
      return;
    }
    this._withdrawn = false;
    if (this._shown !== null) {
      Notification.dismiss(this._shown);
      this._shown = null;
    }
    if (notice.kind === 'cleared') {
      return;
    }
    const text = noticeText(notice);
    this._kind = notice.kind;
    this._text = text;
    if (notice.kind !== 'back' && this._isShownElsewhere()) {
      this._withdrawn = true;
      return;
    }
    const { type, autoClose, hasActions } = TOASTS[notice.kind];
    const actions = hasActions ? this._actions.of(notice.lease).map(buttonOf) : [];
    this._shown = Notification.emit(text, type, { autoClose, actions });
  }

  /** Updates the notification during its phase, because "in 5 min" is soon outdated. */
  private _follow(): void {
    const { lease, state } = this._gpu.model;
    const isHidden = state.kind === 'unreachable' || (this._kind !== 'back' && this._isShownElsewhere());
    if (isHidden && this._shown !== null) {
      // The notification may be wrong while the state is unknown.
      this._withdrawn = Notification.manager.has(this._shown);
      Notification.dismiss(this._shown);
      this._shown = null;
    }
    if (lease === null || phaseOf(lease) !== this._kind) {
      return;
    }
    if (this._withdrawn && !isHidden && (this._kind === 'warned' || this._kind === 'lost')) {
      this.show({ kind: this._kind, lease });
    }
    if (this._shown === null) {
      return;
    }
    const text = noticeText({ kind: this._kind, lease });
    if (text !== this._text && Notification.manager.has(this._shown)) {
      this._text = text;
      Notification.update({ id: this._shown, message: text });
    }
  }

  private _isShownElsewhere(): boolean {
    return this._gpu.sentence.place() !== null;
  }

  private _shown: string | null = null;
  /** Whether the notification was removed without the user's dismissal. */
  private _withdrawn = false;
  private _text = '';
  private _kind: keyof typeof TOASTS = 'warned';
}

/** One line above a notebook while its GPU is warned, suspended, resuming or lost. */
export class Banner extends ReactWidget {
  constructor(
    private readonly _gpu: IGpuModel,
    private readonly _actions: Actions,
    private readonly _notebook: NotebookPanel,
  ) {
    super();
    this.addClass('gpushare-banner');
    this.node.tabIndex = -1;
    this.node.setAttribute('role', 'group');
    this.node.setAttribute('aria-label', trans.__('GPU of this notebook'));
    this.hide();
    const isInSight = (): boolean => _notebook.isVisible;
    const hasSentence = (): boolean => isInSight() && _gpu.options().banner && hasBanner(_gpu.model.lease);
    this._places = [
      _gpu.sentence.add('banner', _notebook.node, hasSentence),
      _gpu.steps.add('banner', _notebook.node, isInSight)
    ];
    _gpu.model.changed.connect(this._follow, this);
    _gpu.sentence.changed.connect(this._follow, this);
    _gpu.steps.changed.connect(() => this.update(), this);
    this._follow();
  }

  /** Adds a banner above a notebook; it is disposed with the notebook. */
  static addTo(
    notebook: NotebookPanel,
    gpu: IGpuModel,
    actions: Actions,
  ): void {
    notebook.contentHeader.addWidget(new Banner(gpu, actions, notebook));
  }

  override dispose(): void {
    this._observer.disconnect();
    this._places.forEach(place => place.dispose());
    super.dispose();
  }

  /** Sets the height from the text, because a content header has no height of its own. */
  private _fit(): void {
    const text = this.node.firstElementChild;
    const height = text === null ? '' : `${Math.max(MIN_PX, text.clientHeight + PADDING_PX)}px`;
    if (this.node.style.minHeight !== height) {
      this.node.style.minHeight = height;
      this.parent?.fit();
    }
  }

  protected override render(): JSX.Element {
    return (
      <UseSignal signal={this._gpu.model.changed}>{() => this._line()}</UseSignal>
    );
  }

  private _line(): JSX.Element | null {
    const { lease } = this._gpu.model;
    if (lease === null || !hasBanner(lease)) {
      return null;
    }
    return (
      <>
        <div role="status" data-phase={phaseOf(lease)} ref={node => this._watch(node)}>
          <b>{lease.badge}.</b> {lease.sentence}{' '}
          {phaseOf(lease) === 'waking' && this._gpu.steps.place() === this._places[1] && (
            <Seconds model={this._gpu.model} />
          )}
        </div>
        <ActionRow actions={this._actions.of(lease)} />
      </>
    );
  }

  private _watch(text: Element | null): void {
    this._observer.disconnect();
    if (text !== null) {
      this._observer.observe(text);
    }
  }

  private readonly _observer = new ResizeObserver(() => this._fit());
  private readonly _places: readonly [IPlace, IPlace];

  private _follow(): void {
    const focused = this.node.contains(document.activeElement);
    this.setHidden(this._gpu.sentence.place() !== this._places[0]);
    if (focused && this.isHidden) {
      this._notebook.activate();
    }
  }
}

/** The current step of waking, with the seconds so far. */
function Seconds(props: { model: IGpuModel['model'] }): JSX.Element | null {
  const [, tick] = React.useState(0);
  React.useEffect(() => {
    const timer = window.setInterval(() => tick(n => n + 1), 1000);
    return () => window.clearInterval(timer);
  }, []);
  const { lease, wakingSince: since } = props.model;
  if (since === null || lease === null) {
    return null;
  }
  const seconds = (Date.now() - since) / 1000;
  // The screen reader hears the sentence, not every second.
  return <span aria-hidden="true">{wakingStep(lease, seconds)}</span>;
}

function hasBanner(lease: ILeaseStatus | null): boolean {
  return lease !== null && BANNER_PHASES.has(phaseOf(lease));
}
