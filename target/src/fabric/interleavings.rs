//! Explores interleavings of several workers sharing the task set of a unit.

use std::sync::Arc;
use std::time::Duration;

use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::NexusId;
use riser_scsi::step::TaskAttribute;
use riser_scsi::task::{Blocks, Footprint, NewTask, TaskKey, TaskManagement};
use riser_sync::atomic::{AtomicBool, AtomicU32, Ordering};
use riser_sync::mpsc::{Receiver, Sender, channel};
use riser_sync::testing::explore;
use riser_sync::thread;

use super::unit::{Unit, UnitIdx};
use super::{TaskIdx, TaskRef};
use crate::fixture::unit_config;

const WORKERS: u16 = 2;

/// A message to a worker about one of its tasks.
enum Note {
    Start(TaskRef),
    Stop(TaskRef),
}

/// State shared by all workers.
struct Shared {
    unit: Unit,
    /// An exclusive command for its blocks is running.
    excludes: AtomicBool,
    executed: AtomicU32,
    cleared: AtomicU32,
}

struct Worker {
    number: u16,
    shared: Arc<Shared>,
    mailbox: Receiver<Note>,
    all: Vec<Sender<Note>>,
    tasks: Vec<(TaskRef, TaskKey)>,
    may_start: Vec<TaskRef>,
}

/// Returns the commands for each worker. They wait for each other due to their order and blocks.
fn commands() -> [NewTask; 3] {
    let compare_and_write = NewTask {
        footprint: Footprint::Atomic(Blocks { first: 0, end: 8 }),
        awaits_data: true,
        ..NewTask::default()
    };
    let ordered = NewTask {
        attribute: TaskAttribute::Ordered,
        ..compare_and_write
    };
    [compare_and_write, ordered, NewTask::default()]
}

fn notify(all: &[Sender<Note>], tasks: Vec<TaskRef>, note: fn(TaskRef) -> Note) {
    for task in tasks {
        // A worker that has exited doesn't have any tasks.
        let _ = all[usize::from(task.worker)].send(note(task));
    }
}

impl Worker {
    fn run(mut self) {
        for (index, new) in commands().into_iter().enumerate() {
            let task = TaskRef {
                worker: self.number,
                channel: 1,
                index: TaskIdx(index as u16),
                generation: 1,
            };
            let (nexus, name) = (NexusId(self.number.into()), (task, LunId::ZERO));
            let unit = &self.shared.unit;
            let (key, mut is_started) = unit.register(nexus, new, name, false, None).unwrap();
            if new.awaits_data {
                let (now, others) = unit.data_arrived(key);
                is_started |= now;
                notify(&self.all, others, Note::Start);
            }
            self.tasks.push((task, key));
            self.may_start.extend(is_started.then_some(task));
        }
        while !self.tasks.is_empty() {
            if let Some(task) = self.may_start.pop() {
                self.execute(task);
                continue;
            }
            let timeout = Duration::from_secs(10);
            match self.mailbox.recv_timeout(timeout).expect("a task starts") {
                Note::Start(task) => self.may_start.push(task),
                Note::Stop(task) => self.finish_task(task),
            }
        }
    }

    fn execute(&mut self, task: TaskRef) {
        if !self.tasks.iter().any(|(own, _)| *own == task) {
            return;
        }
        let new = commands()[usize::from(task.index.0)];
        if matches!(new.footprint, Footprint::Atomic(_)) {
            let excludes = &self.shared.excludes;
            assert!(!excludes.swap(true, Ordering::SeqCst), "two at once");
            thread::yield_now();
            excludes.store(false, Ordering::SeqCst);
        }
        self.finish_task(task);
    }

    /// Removes a completed task, if it was not removed already.
    fn finish_task(&mut self, task: TaskRef) {
        let Some(at) = self.tasks.iter().position(|(own, _)| *own == task) else {
            return;
        };
        let (_, key) = self.tasks.swap_remove(at);
        let (was_cleared, others) = self.shared.unit.remove(key);
        let count = if was_cleared {
            &self.shared.cleared
        } else {
            &self.shared.executed
        };
        count.fetch_add(1, Ordering::SeqCst);
        notify(&self.all, others, Note::Start);
    }
}

#[test]
fn interleavings_complete_each_task_once() {
    explore(|| {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let shared = Arc::new(Shared {
            unit: Unit::new(UnitIdx(0), Arc::new(lu), 16),
            excludes: AtomicBool::new(false),
            executed: AtomicU32::new(0),
            cleared: AtomicU32::new(0),
        });
        let (all, mailboxes): (Vec<_>, Vec<_>) = (0..WORKERS).map(|_| channel()).unzip();
        let workers: Vec<_> = (0..)
            .zip(mailboxes)
            .map(|(number, mailbox)| {
                let worker = Worker {
                    number,
                    shared: Arc::clone(&shared),
                    mailbox,
                    all: all.clone(),
                    tasks: Vec::new(),
                    may_start: Vec::new(),
                };
                thread::spawn(move || worker.run())
            })
            .collect();
        let managed = shared
            .unit
            .manage(NexusId(99), TaskManagement::ClearTaskSet);
        let stopped = managed.aborted.len() as u32;
        notify(&all, managed.aborted, Note::Stop);
        workers.into_iter().for_each(|one| one.join().unwrap());
        let cleared = shared.cleared.load(Ordering::SeqCst);
        let executed = shared.executed.load(Ordering::SeqCst);
        assert_eq!(cleared, stopped);
        assert_eq!(
            cleared + executed,
            u32::from(WORKERS) * commands().len() as u32
        );
        assert_eq!(shared.unit.tasks(), 0);
    });
}
