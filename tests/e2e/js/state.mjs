// SPDX-License-Identifier: Apache-2.0
// Pause, connect, fork and snapshot, as a user's E2B program in JavaScript does them. Prints one
// JSON line of results. An argument `full` says that forks and snapshots hold memory.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { NotFoundError, Sandbox } from 'e2b'

const full = process.argv.includes('full')
const results = { client: 'e2b js', passed: [], failed: {} }
const tag = randomUUID().slice(0, 8)

async function step(name, body) {
  try {
    await body()
    results.passed.push(name)
  } catch (error) {
    results.failed[name] = String(error?.stack ?? error)
  }
}

const pids = async (one) => (await one.commands.list()).map((process) => process.pid)

const sandbox = await Sandbox.create({ timeoutMs: 600_000, metadata: { tag } })

await step('pause and connect', async () => {
  const command = await sandbox.commands.run('sleep 500', { background: true })
  await sandbox.files.write('kept.txt', 'kept')
  assert.equal(await sandbox.pause(), true)
  assert.equal(await sandbox.pause(), false)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  assert.equal(await sandbox.isRunning(), false)
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal(await again.files.read('kept.txt'), 'kept')
  assert.ok((await pids(again)).includes(command.pid))
})

await step('a filesystem pause', async () => {
  assert.equal(await sandbox.pause({ keepMemory: false }), true)
  await sandbox.connect()
  assert.equal(await sandbox.files.read('kept.txt'), 'kept')
  assert.deepEqual(await pids(sandbox), [])
})

await step('a reboot on resume', async () => {
  await sandbox.commands.run('sleep 501', { background: true })
  await sandbox.pause()
  await sandbox.connect({ onResume: 'reboot' })
  assert.deepEqual(await pids(sandbox), [])
})

await step('paused ones are listed', async () => {
  await sandbox.pause()
  const items = await Sandbox.list({ query: { metadata: { tag }, state: ['paused'] } }).nextItems()
  assert.deepEqual(items.map((found) => found.sandboxId), [sandbox.sandboxId])
  await sandbox.connect()
})

await step('pause of a missing sandbox', async () => {
  await assert.rejects(Sandbox.pause('i0000000000000000000'), NotFoundError)
})

await step('automatic resume', async () => {
  const one = await Sandbox.create({
    timeoutMs: 600_000,
    lifecycle: { onTimeout: 'pause', autoResume: true },
  })
  assert.deepEqual((await one.getInfo()).lifecycle, { onTimeout: 'pause', autoResume: true })
  await one.pause()
  assert.equal((await one.commands.run('echo woken')).stdout, 'woken\n')
  await one.kill()
})

await step('fork', async () => {
  await sandbox.files.write('then.txt', 'then')
  const command = await sandbox.commands.run('sleep 502', { background: true })
  const children = await Sandbox.fork(sandbox.sandboxId, { count: 2, timeoutMs: 300_000 })
  assert.equal(children.length, 2)
  for (const child of children) {
    assert.ok(child instanceof Sandbox, String(child))
    assert.equal(await child.files.read('then.txt'), 'then')
    assert.equal((await pids(child)).includes(command.pid), full)
    await child.kill()
  }
  assert.ok((await pids(sandbox)).includes(command.pid))
})

await step('snapshots', async () => {
  const snapshot = await sandbox.createSnapshot({ name: `j-${tag}` })
  const child = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 300_000 })
  assert.equal(await child.files.read('then.txt'), 'then')
  const items = await Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId }).nextItems()
  assert.deepEqual(items.map((found) => found.snapshotId), [snapshot.snapshotId])
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
  await child.kill()
})

await step('kill of a paused sandbox', async () => {
  await sandbox.pause()
  assert.equal(await sandbox.kill(), true)
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
})

console.log(JSON.stringify(results))
process.exit(Object.keys(results.failed).length ? 1 : 0)
