/** `1/2 GPU 6.8/40 GiB Active` in the status bar, coloured only when it needs attention. */

import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import { ISignal, Signal } from '@lumino/signaling';
import React from 'react';

import { GpuState, phaseOf } from './state';
import { chipIcon, IGpuModel } from './tokens';
import { sentence, statusText, wantsAttention } from './messages';
import { trans } from './translate';

export class StatusItem extends ReactWidget {
  constructor(
    private readonly _gpu: IGpuModel,
    private readonly _open: () => void
  ) {
    super();
    this.addClass('gpushare-status');
    _gpu.model.changed.connect(() => this._activeStateChanged.emit(), this);
    _gpu.sentence.changed.connect(() => this.update(), this);
  }

  /** Whether there is text to show. */
  get isActive(): boolean {
    return statusText(this._gpu.model.state) !== '';
  }

  get activeStateChanged(): ISignal<this, void> {
    return this._activeStateChanged;
  }

  protected override render(): JSX.Element {
    return (
      <UseSignal signal={this._gpu.model.changed}>{() => this._item(this._gpu.model.state)}</UseSignal>
    );
  }

  private _item(state: GpuState): JSX.Element | null {
    const text = statusText(state);
    if (text === '') {
      return null;
    }
    const phase = state.kind === 'ready' && state.lease !== null ? phaseOf(state.lease) : null;
    return (
      <button
        type="button"
        className={wantsAttention(state, phase) ? 'gpushare-attention' : ''}
        title={
          this._gpu.sentence.place() === null
            ? sentence(state)
            : trans.__('Show my GPU, my projects and my training jobs')
        }
        onClick={this._open}
      >
        <chipIcon.react tag="span" stylesheet="statusBar" />
        <span>{text}</span>
      </button>
    );
  }

  private readonly _activeStateChanged = new Signal<this, void>(this);
}
