//! The congestion window of a requester: how many packets may be unacknowledged.
//!
//! Go-back-N sends everything after a lost packet again, so a loss costs about a window of packets,
//! of any size. What is wasted is therefore one part in as many round trips as pass between
//! two losses. The window grows and shrinks so that these are several dozen:
//!
//! ```text
//! slow start            below the threshold: one packet for each acknowledged one
//! avoidance             from there on: a part in 45, twice as much after each 64 round trips
//!                       without a cut, so that a path that has become free is soon used
//! lost packet           half, at most once in a round trip; the threshold is set there
//! marked packet         an eighth, or half of it in slow start; the threshold is set there
//! time-out              as a lost packet, and slow start from a few packets
//! ```
//!
//! A window is only taken for more than it is where it has been used, so an idle connection does
//! not collect one.
//!
//! # Less than one packet
//!
//! A port that more flows share than it has room for packets overflows with a window of one packet
//! each. So a window may be a part of a packet, down to [`MIN_WINDOW`]: one packet is under way
//! then, and the next one leaves after a round trip divided by the window ([`Congestion::gap`]).
//! That is a floor for the rate too: no number of losses stops a connection.

use std::time::Duration;

/// One packet, as windows count.
const PACKET: u32 = 1 << 16;

/// The smallest window: a sixteenth of a packet.
const MIN_WINDOW: u32 = PACKET / 16;

/// Initial window in bytes, and its bounds in packets (as RFC 6928).
const INITIAL_BYTES: u32 = 16 << 10;
const INITIAL_PACKETS: std::ops::RangeInclusive<u32> = 4..=16;

/// Packets in flight right after a time-out.
pub const RECOVERY_WINDOW: u32 = 4;

/// Growth of a window of one packet or more for an acknowledged packet, past the threshold.
const GAIN: u32 = PACKET / 45;

/// Round trips without a cut after which the gain doubles.
const QUIET_ROUNDS: u32 = 64;

/// Slow start goes on to the maximum, even after that changes.
const NO_THRESHOLD: u32 = u32::MAX;

/// The longest time between two packets for the sake of the window.
const MAX_GAP: Duration = Duration::from_millis(2);

/// The window. Packet numbers are those of the requester.
#[derive(Clone, Copy, Debug)]
pub(super) struct Congestion {
    /// In parts of [`PACKET`], as are the next two.
    window: u32,
    /// Window at which slow start ends: [`NO_THRESHOLD`] before the first cut.
    threshold: u32,
    max: u32,
    /// Signals about packets before this one belong to the last cut.
    recover: u64,
    /// Packet number that ends the current round trip, and round trips since the last cut.
    round_end: u64,
    rounds: u32,
    /// Routers on the path mark packets before they drop them: the last cut was for a mark.
    is_marking: bool,
}

impl Congestion {
    /// A window of at most `max` packets of `mtu` bytes.
    pub(super) fn new(max: u32, mtu: u32) -> Self {
        // By bytes, as that is what a queue on the path holds, so short packets may be more.
        let initial =
            (INITIAL_BYTES / mtu.max(1)).clamp(*INITIAL_PACKETS.start(), *INITIAL_PACKETS.end());
        let max = window_of(max);
        Self {
            window: max.min(initial * PACKET),
            threshold: NO_THRESHOLD,
            max,
            recover: 0,
            round_end: 0,
            rounds: 0,
            is_marking: false,
        }
    }

    /// Changes the maximum to `max` packets.
    pub(super) fn set_max(&mut self, max: u32) {
        let max = window_of(max);
        self.max = max;
        self.window = self.window.min(max);
    }

    /// Packets that may be in flight; at least one.
    pub(super) fn packets(&self) -> u32 {
        (self.window / PACKET).max(1)
    }

    /// Whether it is less than one packet.
    pub(super) fn is_partial(&self) -> bool {
        self.window < PACKET
    }

    /// The time from one packet to the next where the window is less than one packet.
    pub(super) fn gap(&self, round_trip: Duration) -> Option<Duration> {
        (self.window < PACKET).then(|| {
            // A round trip that was measured behind a long queue must not stretch the pause.
            let gap = round_trip * PACKET / self.window;
            gap.min(MAX_GAP)
        })
    }

    /// `packets` were acknowledged, up to packet `una`; `nxt` is sent next.
    pub(super) fn on_progress(&mut self, packets: u32, una: u64, nxt: u64) {
        // A window that was not needed has not been tried.
        let in_flight = nxt.saturating_sub(una) + u64::from(packets);
        // Half of it at least was in flight. An acknowledgement in the middle of a window finds
        // some of it acknowledged already, hence not the whole.
        if self.window == self.max || in_flight * 2 < u64::from(self.packets()) {
            return;
        }
        if self.window < self.threshold {
            let wider = self.window.saturating_add(packets.saturating_mul(PACKET));
            self.window = wider.min(self.threshold).min(self.max);
            return;
        }
        // A round trip ends when what was sent at its beginning is acknowledged.
        if una >= self.round_end {
            self.round_end = nxt;
            self.rounds = self.rounds.saturating_add(1);
        }
        // Bounded: with 64 times the gain it grows as in slow start.
        let doublings = (self.rounds / QUIET_ROUNDS).min(6);
        let gain = match (self.is_marking, self.is_partial()) {
            // Without marks the only signal is a loss, which costs a window of packets, hence a
            // part of the window in a round trip. With marks a 32nd of a packet in a round trip
            // keeps it near the point where the router begins to mark. Below one packet each
            // packet is a round trip of its own, and the gain follows the window, as the pace
            // does.
            (false, false) => GAIN,
            (false, true) => self.window / 200 + PACKET / 500,
            (true, false) => PACKET / 32 / (self.window / PACKET),
            (true, true) => self.window / 64 + PACKET / 128,
        };
        let gain = packets.saturating_mul(gain << doublings);
        let wider = self.window.saturating_add(gain);
        self.window = wider.min(self.max);
    }

    /// A packet from `una` on was lost, the peer says. `nxt` is what would have been sent next.
    pub(super) fn on_loss(&mut self, una: u64, nxt: u64) {
        // Packets before `recover` were sent with the wider window; their loss has been paid for.
        if una >= self.recover {
            self.cut(self.loss(), nxt);
        }
    }

    /// A packet from `una` on was marked on its way, or the answer to one. Nothing has been lost,
    /// so the window gives way less.
    pub(super) fn on_mark(&mut self, una: u64, nxt: u64) {
        // Where nothing was sent since the last cut, there is nothing that another mark could be
        // about.
        if una >= self.recover && nxt > self.recover {
            // In slow start the window doubles in a round trip, so by the time of a mark it may
            // be twice what the path takes.
            let end_of_slow_start = self.threshold.min(self.max);
            let part = if self.window < end_of_slow_start {
                2
            } else {
                8
            };
            self.cut(self.window / part, nxt);
            self.is_marking = true;
        }
    }

    /// Nothing came for so long that packets must have been lost.
    pub(super) fn on_timeout(&mut self, nxt: u64) {
        // Without regard to `recover`: a timeout in a recovery is news, since repeated packets
        // were lost.
        self.cut(self.loss(), nxt);
        // Nothing is known about the path, so it is tried with a few packets; the threshold of
        // the cut says up to where it may then double.
        self.window = self.window.min(RECOVERY_WINDOW * PACKET);
    }

    fn loss(&self) -> u32 {
        // Below one packet each packet is a round trip of its own, so each loss would halve the
        // rate.
        if self.is_partial() {
            self.window / 4
        } else {
            self.window / 2
        }
    }

    fn cut(&mut self, by: u32, nxt: u64) {
        self.window = (self.window - by).max(MIN_WINDOW);
        self.threshold = self.window;
        self.recover = nxt;
        self.round_end = nxt;
        self.rounds = 0;
        self.is_marking = false;
    }
}

/// The widest window of `packets` at most.
fn window_of(packets: u32) -> u32 {
    // At least one packet, or nothing would ever leave; at most what the fixed-point window can
    // hold.
    packets.clamp(1, u32::MAX / PACKET) * PACKET
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_maximum_bounds_the_window_and_lets_slow_start_go_on_to_it() {
        let mut window = Congestion::new(8, 4096);
        let (mut una, mut nxt) = (0, 0);
        let mut round = |window: &mut Congestion| {
            let packets = window.packets();
            (una, nxt) = (nxt, nxt + u64::from(packets));
            window.on_progress(packets, una, nxt);
            window.packets()
        };
        while round(&mut window) < 8 {}
        window.set_max(64);
        assert_eq!((round(&mut window), round(&mut window)), (16, 32));
        window.set_max(20);
        assert_eq!(window.packets(), 20);
        assert_eq!(round(&mut window), 20);
        // A threshold that a loss has found stays.
        window.on_loss(nxt, nxt);
        window.set_max(64);
        assert_eq!(window.packets(), 10);
    }

    #[test]
    fn a_threshold_that_a_loss_has_found_outlives_a_narrower_maximum() {
        let mut window = Congestion::new(64, 4096);
        let (mut una, mut nxt) = (0, 0);
        let mut round = |window: &mut Congestion| {
            let packets = window.packets();
            (una, nxt) = (nxt, nxt + u64::from(packets));
            window.on_progress(packets, una, nxt);
            window.packets()
        };
        while round(&mut window) < 64 {}
        window.on_loss(0, 0);
        window.set_max(32);
        window.set_max(64);
        assert_eq!(
            round(&mut window),
            32,
            "past the threshold it grows by less than a packet"
        );
    }

    /// Acknowledges whole windows until `f` answers true; how many round trips that took.
    fn rounds_until(c: &mut Congestion, una: &mut u64, f: impl Fn(&Congestion) -> bool) -> u32 {
        let mut rounds = 0;
        while !f(c) {
            let packets = c.packets();
            *una += u64::from(packets);
            c.on_progress(packets, *una, *una);
            rounds += 1;
            assert!(rounds < 100_000, "{c:?}");
        }
        rounds
    }

    #[test]
    fn a_new_connection_doubles_its_window_in_each_round_trip() {
        let mut c = Congestion::new(41, 1024);
        assert_eq!(c.packets(), 16);
        assert_eq!(rounds_until(&mut c, &mut 0, |c| c.packets() == 41), 2);
        assert_eq!(Congestion::new(120, 4096).packets(), 4);
        assert_eq!(Congestion::new(3, 4096).packets(), 3);
    }

    #[test]
    fn a_loss_costs_half_the_window_once_in_a_round_trip_and_dozens_to_earn_again() {
        let (mut c, mut una) = (Congestion::new(16, 1024), 0);
        rounds_until(&mut c, &mut una, |c| c.packets() == 16);
        c.on_loss(una, una + 16);
        c.on_loss(una + 15, una + 31);
        assert_eq!(c.packets(), 8);
        let rounds = rounds_until(&mut c, &mut una, |c| c.packets() == 16);
        assert!((25..64).contains(&rounds), "{rounds}");
        c.on_loss(una, una);
        c.on_loss(una, una);
        assert_eq!(c.packets(), 4);
    }

    #[test]
    fn a_mark_costs_an_eighth_once_in_a_round_trip() {
        let mut c = Congestion::new(64, 1024);
        let mut una = 0;
        c.on_mark(una, 16);
        c.on_mark(una + 1, 17);
        assert_eq!(c.packets(), 8, "slow start was too fast");
        rounds_until(&mut c, &mut una, |c| c.packets() == 16);
        c.on_mark(una, una + 16);
        c.on_mark(una + 15, una + 31);
        assert_eq!(c.packets(), 14);
        let idle = una + 31;
        c.on_mark(idle, idle);
        let before = c.packets();
        (0..10).for_each(|_| c.on_mark(idle, idle));
        assert_eq!(c.packets(), before, "nothing was sent since");
        for n in 1..1000 {
            c.on_mark(idle + n, idle + n + 1);
        }
        assert!(c.gap(Duration::from_micros(50)) <= Some(Duration::from_micros(800)));
    }

    #[test]
    fn a_window_that_is_not_used_does_not_grow() {
        let mut c = Congestion::new(120, 1024);
        for una in 0..1000 {
            c.on_progress(1, una, una);
        }
        assert_eq!(c.packets(), 16);
    }

    #[test]
    fn no_number_of_losses_stops_a_connection() {
        let mut c = Congestion::new(120, 1024);
        for una in 0..1000 {
            c.on_loss(una, una);
            c.on_timeout(una);
        }
        assert_eq!(c.packets(), 1);
        let trip = Duration::from_micros(50);
        assert_eq!(c.gap(trip), Some(trip * 16));
        assert_eq!(c.gap(Duration::from_secs(1)), Some(MAX_GAP));
        // And when they end, the path is soon used again.
        let mut una = 1000;
        let packets = rounds_until(&mut c, &mut una, |c| !c.is_partial());
        assert!(packets < 200, "{packets}");
        assert_eq!(c.gap(trip), None);
        let rounds = rounds_until(&mut c, &mut una, |c| c.packets() == 120);
        assert!(rounds < 300, "{rounds}");
    }
}
