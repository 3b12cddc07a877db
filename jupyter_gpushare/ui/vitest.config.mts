import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['test/*.test.ts'],
    environment: 'node',
    pool: 'threads',
    poolOptions: { threads: { maxThreads: 1 } },
    // No test is judged by the clock of a machine that may be busy.
    testTimeout: 120_000
  }
});
