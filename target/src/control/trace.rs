//! Command traces for `riserd trace`: the request and its result.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use riser_admin_api::trace::{Traced, TracedCommand, TracedStep, Wanted};
use riser_scsi::opcode::Opcode;

use super::view::{Inventory, SessionView};
use crate::server::Server;
use crate::stats::{Record, Tracer};

/// Interval to check if the trace is complete.
pub const EVERY: Duration = Duration::from_millis(100);

/// Number of commands to keep between two polls.
const KEPT: usize = 10_000;

/// Time after which a trace that is not polled can be replaced.
const FORGOTTEN: Duration = Duration::from_secs(5);

/// An active trace, which is stopped on drop.
#[derive(Debug)]
pub(super) struct Search {
    wanted: Wanted,
    tracer: Arc<Tracer>,
    units: Vec<Arc<crate::stats::LunStats>>,
    found: Traced,
    /// Time when the client last polled the trace.
    last_polled: Instant,
}

impl Search {
    /// Starts a trace.
    ///
    /// # Errors
    /// Fails if the target or unit does not exist.
    pub(super) fn start(server: &Server, wanted: Wanted) -> Result<Self, String> {
        let catalog = server.shared().registry.catalog();
        let units: Vec<_> = catalog
            .targets
            .iter()
            .flat_map(|target| &target.stats)
            .filter(|stats| wanted.target.as_deref().is_none_or(|t| t == stats.target()))
            .filter(|stats| wanted.lun.is_none_or(|lun| lun == stats.lun()))
            .cloned()
            .collect();
        // Without this check, the client would wait for the whole duration even though there cannot
        // be any matches.
        if units.is_empty() {
            return Err("unknown logical unit".to_owned());
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
            last_polled: Instant::now(),
        })
    }

    /// Returns true if the client has stopped polling.
    pub(super) fn is_forgotten(&self) -> bool {
        self.last_polled.elapsed() > FORGOTTEN
    }

    /// Collects new commands since the last poll. Returns true if the trace is complete.
    pub(super) fn poll(&mut self, server: &Server) -> bool {
        self.last_polled = Instant::now();
        let records = self.tracer.take_records();
        if !records.is_empty() {
            // We must do this now, because sessions can be closed before the trace is complete, and
            // a record only contains the nexus number.
            let sessions = Inventory::new(server).sessions();
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

    /// Stops the trace and returns the result.
    pub(super) fn stop(mut self, server: &Server) -> Traced {
        self.poll(server);
        let mut found = std::mem::take(&mut self.found);
        // This must be read after the last poll, which may have dropped commands.
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
    session: Option<&SessionView>,
    (now, time): (Instant, SystemTime),
    // Workers only use the monotonic clock. We compute the time of day from a single pair of both
    // clocks, so that a clock adjustment does not reorder commands.
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

/// Returns the LBA and number of blocks of a command.
fn blocks(opcode: &Opcode, cdb: &[u8]) -> Option<(u64, u32)> {
    let blocks = opcode.blocks(cdb)?;
    Some((blocks.first, u32::try_from(blocks.end - blocks.first).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_parsed_from_all_cdbs() {
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
}
