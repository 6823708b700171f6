//! The ways of single commands, for `riserd trace`: who asked for them, and what was found.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use riser_scsi::opcode::Opcode;
use serde::{Deserialize, Serialize};

use super::view;
use crate::server::Server;
use crate::stats::{Record, Tracer};

/// Commands that are told at most.
pub const MOST_COMMANDS: usize = 10_000;

/// Seconds that they are looked for at most.
pub const MOST_SECONDS: f64 = 3600.0;

/// How often it is looked whether enough were found.
pub const EVERY: Duration = Duration::from_millis(100);

/// Commands that are kept from one look to the next.
const KEPT: usize = 10_000;

/// How long one that nobody asks after any more is in the way of others.
const FORGOTTEN: Duration = Duration::from_secs(5);

/// Which commands are wanted; what is left out does not matter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wanted {
    /// Those to this target.
    pub target: Option<String>,
    /// Those to the logical unit of this number.
    pub lun: Option<u16>,
    /// Those of this initiator port, or of an initiator whose name begins so.
    pub initiator: Option<String>,
    /// Those of this tag: SRP's, or the initiator task tag of iSCSI.
    pub tag: Option<u64>,
    /// Those that take at least so long, in seconds.
    pub slower_than: f64,
    /// So many; 100 by default.
    pub count: Option<usize>,
    /// Those that end within so many seconds; 10 by default.
    pub seconds: Option<f64>,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Traced {
    /// Commands, in the order of their ends.
    pub commands: Vec<TracedCommand>,
    /// How many more there were than could be kept.
    pub missed: u64,
}

/// A command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedCommand {
    /// When it came, in seconds since 1970.
    pub time: f64,
    /// The target's name.
    pub target: String,
    /// The logical unit.
    pub lun: u16,
    /// The initiator port; none if its session is gone already.
    pub initiator: Option<String>,
    /// `srp`, `iser` or `iscsi`; likewise.
    pub protocol: Option<String>,
    /// The I_T nexus.
    pub nexus: u64,
    /// Its tag.
    pub tag: u64,
    /// Operation code.
    pub opcode: u8,
    /// What that is called.
    pub name: Option<String>,
    /// The first logical block, where the command names blocks.
    pub lba: Option<u64>,
    /// How many blocks; likewise.
    pub blocks: Option<u32>,
    /// Data both ways.
    pub bytes: u64,
    /// SCSI status.
    pub status: u8,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// The stages that it was in.
    pub steps: Vec<TracedStep>,
}

/// A stage of a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedStep {
    /// `fabric_in`, `scsi`, `limits`, `backend` or `fabric_out`.
    pub stage: String,
    /// How long after it had come the command reached it, in seconds.
    pub at: f64,
}

impl Wanted {
    /// Whether it is sensible.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), String> {
        let is_time = |seconds: f64| (0.0..=MOST_SECONDS).contains(&seconds);
        if !is_time(self.slower_than) || !self.seconds.is_none_or(is_time) {
            return Err(format!("times are from 0 to {MOST_SECONDS} seconds"));
        }
        if !(1..=MOST_COMMANDS).contains(&self.count()) {
            return Err(format!("a count is from 1 to {MOST_COMMANDS}"));
        }
        Ok(())
    }

    /// How many are enough.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.unwrap_or(100)
    }

    /// How long they are looked for.
    #[must_use]
    pub fn patience(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(10.0))
    }
}

/// A search under way. It ends when it is dropped.
#[derive(Debug)]
pub(super) struct Search {
    wanted: Wanted,
    tracer: Arc<Tracer>,
    units: Vec<Arc<crate::stats::LunStats>>,
    found: Traced,
    /// When somebody last asked after it.
    asked: Instant,
}

impl Search {
    /// Begins to look at the commands that are served.
    ///
    /// # Errors
    /// There is no such target or unit.
    pub(super) fn begin(server: &Server, wanted: Wanted) -> Result<Self, String> {
        let catalog = server.shared().registry.catalog();
        let units: Vec<_> = catalog
            .targets
            .iter()
            .flat_map(|target| &target.stats)
            .filter(|stats| wanted.target.as_deref().is_none_or(|t| t == stats.target()))
            .filter(|stats| wanted.lun.is_none_or(|lun| lun == stats.lun()))
            .cloned()
            .collect();
        if units.is_empty() {
            return Err("no such logical unit is served".to_owned());
        }
        let slower_than = Duration::from_secs_f64(wanted.slower_than);
        let tracer = Arc::new(Tracer::new(wanted.tag, slower_than, KEPT));
        for unit in &units {
            unit.trace(Some(Arc::clone(&tracer)));
        }
        Ok(Self {
            wanted,
            tracer,
            units,
            found: Traced::default(),
            asked: Instant::now(),
        })
    }

    /// Whether nobody asks after it any more.
    pub(super) fn is_forgotten(&self) -> bool {
        self.asked.elapsed() > FORGOTTEN
    }

    /// Takes what was found since the last look; whether it is enough.
    pub(super) fn look(&mut self, server: &Server) -> bool {
        self.asked = Instant::now();
        let records = self.tracer.take();
        if !records.is_empty() {
            let sessions = view::sessions(server);
            let now = (Instant::now(), SystemTime::now());
            for record in records {
                let nexus = Some(record.subject.nexus);
                let session = sessions.iter().find(|session| session.nexus == nexus);
                let command = command(record, session, now);
                if self.found.commands.len() < self.wanted.count() && self.is_wanted(&command) {
                    self.found.commands.push(command);
                }
            }
        }
        self.found.commands.len() >= self.wanted.count()
    }

    fn is_wanted(&self, command: &TracedCommand) -> bool {
        let Some(wanted) = &self.wanted.initiator else {
            return true;
        };
        let name = command.initiator.as_deref();
        name.is_some_and(|name| name.starts_with(wanted.as_str()))
    }

    /// What was found, to the end.
    pub(super) fn end(mut self, server: &Server) -> Traced {
        self.look(server);
        let mut found = std::mem::take(&mut self.found);
        found.missed = self.tracer.missed();
        found
    }
}

impl Drop for Search {
    fn drop(&mut self) {
        for unit in &self.units {
            unit.trace(None);
        }
    }
}

fn command(
    record: Record,
    session: Option<&view::SessionView>,
    (now, time): (Instant, SystemTime),
) -> TracedCommand {
    let ago = now.saturating_duration_since(record.begun);
    let begun = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let subject = &record.subject;
    let opcode = Opcode::of(&subject.cdb);
    let blocks = blocks(opcode, &subject.cdb);
    let steps = record.steps.iter().map(|(stage, at)| TracedStep {
        stage: stage.name().to_owned(),
        at: at.as_secs_f64(),
    });
    TracedCommand {
        time: begun.saturating_sub(ago).as_secs_f64(),
        initiator: session.map(|session| session.initiator.clone()),
        protocol: session.map(|session| session.protocol.clone()),
        nexus: subject.nexus,
        tag: subject.tag,
        opcode: subject.cdb.first().copied().unwrap_or_default(),
        name: opcode.is_known().then(|| opcode.name.to_owned()),
        lba: blocks.map(|(lba, _)| lba),
        blocks: blocks.map(|(_, blocks)| blocks),
        bytes: record.bytes,
        status: record.status,
        seconds: record.took.as_secs_f64(),
        steps: steps.collect(),
        lun: record.lun,
        target: record.target,
    }
}

/// LBA and number of the blocks that a command is about.
fn blocks(opcode: &Opcode, cdb: &[u8]) -> Option<(u64, u32)> {
    let blocks = opcode.blocks(cdb)?;
    Some((blocks.first, u32::try_from(blocks.end - blocks.first).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_from_every_form_of_a_cdb() {
        for (cdb, expected) in [
            (&[0x08, 0x01, 0x02, 0x03, 0, 0][..], Some((0x1_0203, 256))),
            (&[0x2a, 0, 0, 0, 0, 9, 0, 0, 8, 0], Some((9, 8))),
            (&[0xa8, 0, 0, 0, 0, 9, 0, 0, 1, 0, 0, 0], Some((9, 256))),
            (
                &[0x88, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0],
                Some(((1 << 56) | 2, 3)),
            ),
            (
                &[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0],
                Some((2, 1)),
            ),
            (&[0x12, 0, 0, 0, 96, 0], None),
            (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], None),
            (&[0x2a, 0, 0], None),
        ] {
            assert_eq!(blocks(Opcode::of(cdb), cdb), expected, "{cdb:02x?}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(Wanted::default().check(), Ok(()));
        for wanted in [
            Wanted {
                slower_than: -1.0,
                ..Wanted::default()
            },
            Wanted {
                slower_than: f64::NAN,
                ..Wanted::default()
            },
            Wanted {
                seconds: Some(1e9),
                ..Wanted::default()
            },
            Wanted {
                count: Some(0),
                ..Wanted::default()
            },
        ] {
            assert!(wanted.check().is_err(), "{wanted:?}");
        }
    }
}
