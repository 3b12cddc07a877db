/** The plugins; each can be disabled separately. */

import {
  ILayoutRestorer,
  JupyterFrontEnd,
  JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { Dialog, ICommandPalette, showDialog } from '@jupyterlab/apputils';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStateDB } from '@jupyterlab/statedb';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { ReadonlyJSONObject } from '@lumino/coreutils';

import { Actions } from './actions';
import { attempt } from './attempt';
import { CellLines } from './cells';
import { listen } from './events';
import { Interrupts } from './interrupts';
import { owner } from './kernels';
import { jobsPlugin } from './jobsplugin';
import { GpuModel } from './model';
import { ISeenJobs, seenJobs } from './state';
import { Banner, Toasts } from './notices';
import { GpuPanel, IPanelLinks } from './panel';
import { Requests } from './requests';
import { Sight } from './sight';
import { StatusItem } from './statusbar';
import { chipIcon, CommandIDs, IGpuModel, IOptions } from './tokens';
import { setTranslations, trans } from './translate';

const MODEL_ID = 'jupyter-gpushare:model';
const PANEL_ID = 'gpushare-panel';
/** JupyterLab's own command, behind a Hub. */
const HUB = 'hub:control-panel';

const model: JupyterFrontEndPlugin<IGpuModel> = {
  id: MODEL_ID,
  description: 'Knows the share of a GPU that this server holds.',
  autoStart: true,
  provides: IGpuModel,
  optional: [ISettingRegistry, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    registry: ISettingRegistry | null,
    translator: ITranslator | null
  ): IGpuModel => {
    setTranslations((translator ?? nullTranslator).load('jupyter_gpushare'));
    const requests = new Requests(app.serviceManager.serverSettings);
    const model = new GpuModel(requests);
    // A hidden page sends no requests; it refreshes when it becomes visible.
    const refresh = (): void => {
      if (document.visibilityState === 'visible') {
        void model.refresh();
      }
    };
    listen(app.serviceManager.serverSettings, refresh);
    document.addEventListener('visibilitychange', () => {
      if (document.visibilityState === 'visible') {
        void model.refreshAfterAbsence();
      }
    });
    // JupyterLab's tabs hide clicks from the browser, which then treats the last key as the last input.
    for (const type of ['pointerdown', 'keydown']) {
      document.addEventListener(type, () => (document.body.dataset.gpushareLast = type), true);
    }
    let options: IOptions = { keepMinutes: 30, toasts: true, banner: true };
    void registry
      ?.load(MODEL_ID)
      .then(settings => {
        const follow = (): void => {
          options = settings.composite as unknown as IOptions;
          model.intervalMs = 1000 * (settings.get('refreshSeconds').composite as number);
          model.redraw();
        };
        settings.changed.connect(follow);
        follow();
      })
      .catch(() => undefined); // the defaults stay
    return {
      model,
      requests,
      sentence: new Sight(),
      steps: new Sight(),
      reasons: new Sight(),
      options: () => options
    };
  }
};

const panel: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpushare:panel',
  description: 'The sidebar and the commands of the shared GPU.',
  autoStart: true,
  requires: [IGpuModel],
  optional: [ICommandPalette, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    gpu: IGpuModel,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null
  ): void => {
    const actions = new Actions(gpu);
    const links = (): IPanelLinks => linksOf(app, gpu);
    const widget = new GpuPanel(gpu, actions, links);
    widget.id = PANEL_ID;
    widget.title.icon = chipIcon;
    widget.title.caption = trans.__('Shared GPU');
    app.shell.add(widget, 'right', { rank: 900, type: 'Shared GPU' });
    restorer?.add(widget, PANEL_ID);
    addCommands(app, gpu, actions);
    for (const command of [CommandIDs.open, CommandIDs.wake, CommandIDs.keep, CommandIDs.lend]) {
      palette?.addItem({ command, category: trans.__('Shared GPU') });
    }
    gpu.model.changed.connect((_, state) => {
      if (state.kind === 'off') {
        widget.dispose();
      }
      app.commands.notifyCommandChanged();
    });
  }
};

function linksOf(app: JupyterFrontEnd, gpu: IGpuModel): IPanelLinks {
  const { commands } = app;
  return {
    release: async (lease, process) => {
      const name = owner(process);
      const pids = lease.processes.filter(each => each.keeps).map(each => each.pid);
      const answer = await showDialog({
        title: trans.__('Release the GPU memory of %1?', name),
        body: process.keeps
          ? trans.__('The processes that keep it are ended at once (%1). Running kernels go on.', pids.join(', '))
          : trans.__('Its kernel is restarted: all of its variables are lost.'),
        buttons: [
          Dialog.cancelButton(),
          Dialog.warnButton({
            label: process.keeps ? trans.__('End the processes') : trans.__('Restart the kernel')
          })
        ]
      });
      if (!answer.button.accept) {
        return;
      }
      await attempt(async () => {
        await (process.keeps
          ? gpu.requests.releaseLeft(lease.id)
          : gpu.requests.releaseKernel(lease.id, process.kernel_id));
        await gpu.model.refresh();
      });
    },
    resize: async lease => {
      const { resize } = await import('./sizedialog');
      const hub = commands.hasCommand(HUB) ? () => void commands.execute(HUB) : null;
      const { state } = gpu.model;
      const projects = state.kind === 'ready' ? state.status.projects.map(project => project.name) : [];
      await resize(lease, projects, hub, size => gpu.requests.resize(lease, size));
      await gpu.model.refresh();
    },
    hub: commands.hasCommand(HUB) ? () => void commands.execute(HUB) : null,
    jobs: commands.hasCommand(CommandIDs.jobs)
      ? {
          open: job => void commands.execute(CommandIDs.jobs, job === undefined ? {} : { job }),
          submit: () => void commands.execute(CommandIDs.launch)
        }
      : null
  };
}

function addCommands(
  app: JupyterFrontEnd,
  gpu: IGpuModel,
  actions: Actions,
): void {
  const isOn = (): boolean => gpu.model.state.kind !== 'off';
  app.commands.addCommand(CommandIDs.open, {
    label: trans.__('Shared GPU'),
    caption: trans.__('Show my GPU, my projects and my training jobs'),
    icon: chipIcon,
    isVisible: isOn,
    execute: () => app.shell.activateById(PANEL_ID)
  });
  const verbs = [
    { id: CommandIDs.wake, make: () => actions.wake() },
    { id: CommandIDs.keep, make: () => actions.keep() },
    { id: CommandIDs.lend, make: () => actions.lend() }
  ];
  for (const { id, make } of verbs) {
    app.commands.addCommand(id, {
      label: () => trans.__('GPU: %1', make().label),
      caption: () => make().caption,
      isVisible: isOn,
      isEnabled: () => {
        const { lease } = gpu.model;
        return lease !== null && actions.of(lease).some(action => action.verb === make().verb);
      },
      execute: () => make().run()
    });
  }
}

const statusBar: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpushare:status-bar',
  description: 'The shared GPU in the status bar.',
  autoStart: true,
  requires: [IGpuModel],
  // Notebook 7 has no status bar.
  optional: [IStatusBar],
  activate: (
    app: JupyterFrontEnd,
    gpu: IGpuModel,
    bar: IStatusBar | null
  ): void => {
    if (bar === null) {
      return;
    }
    const open = (): void => {
      if (app.commands.hasCommand(CommandIDs.open)) {
        void app.commands.execute(CommandIDs.open);
      }
    };
    const item = new StatusItem(gpu, open);
    bar.registerStatusItem('jupyter-gpushare:status-bar', {
      item,
      align: 'left',
      rank: 100,
      isActive: () => item.isActive,
      activeStateChanged: item.activeStateChanged
    });
  }
};

const banner: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpushare:banner',
  description: 'A line above every notebook, and below a waiting cell, around a suspension.',
  autoStart: true,
  requires: [IGpuModel, INotebookTracker],
  activate: (
    app: JupyterFrontEnd,
    gpu: IGpuModel,
    notebooks: INotebookTracker
  ): void => {
    const actions = new Actions(gpu);
    const lines = new CellLines(gpu);
    const isNeeded = (restarted: string): boolean =>
      Array.from(app.serviceManager.kernels.running()).some(
        kernel => kernel.id !== restarted && kernel.execution_state === 'busy'
      );
    const interrupts = new Interrupts(gpu.model, actions, isNeeded);
    app.commands.commandExecuted.connect((_, { id }) => interrupts.onCommand(id));
    const add = (notebook: NotebookPanel): void => {
      interrupts.watch(notebook);
      Banner.addTo(notebook, gpu, actions);
      lines.watch(notebook);
    };
    notebooks.forEach(add);
    notebooks.widgetAdded.connect((_, notebook) => add(notebook));
  }
};

const SEEN_KEY = 'jupyter-gpushare:seen-jobs';

const notifications: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpushare:notifications',
  description: 'Tells when the GPU is lent or back, and when a training job ends or is paused.',
  autoStart: true,
  requires: [IGpuModel],
  optional: [IStateDB],
  activate: (
    app: JupyterFrontEnd,
    gpu: IGpuModel,
    state: IStateDB | null
  ): void => {
    const openJob = (job?: string): void => {
      const command = [CommandIDs.jobs, CommandIDs.open].find(id => app.commands.hasCommand(id));
      if (command !== undefined) {
        void app.commands.execute(command, job === undefined ? {} : { job });
      }
    };
    const toasts = new Toasts(gpu, new Actions(gpu), openJob);
    gpu.model.noticed.connect((_, notice) => {
      if (gpu.options().toasts) {
        toasts.show(notice);
      }
    });
    // Notices for jobs that changed since the last page load.
    void state?.fetch(SEEN_KEY).then(seen => {
      if (seen !== undefined) {
        gpu.model.catchUp(seen as unknown as ISeenJobs);
      }
      let saved = JSON.stringify(seen);
      const save = (): void => {
        const now = gpu.model.state;
        const text = now.kind === 'ready' ? JSON.stringify(seenJobs(now.status.jobs)) : saved;
        if (text !== saved) {
          saved = text;
          void state.save(SEEN_KEY, JSON.parse(text) as ReadonlyJSONObject);
        }
      };
      gpu.model.changed.connect(save);
      save();
    });
  }
};

const plugins: JupyterFrontEndPlugin<unknown>[] = [
  model,
  panel,
  statusBar,
  banner,
  notifications,
  jobsPlugin
];

export { IGpuModel } from './tokens';
export default plugins;
