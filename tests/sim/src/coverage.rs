//! Coverage of runs: state machine transitions in the programs, faults, and results of commands.
//!
//! Transitions are recorded by [`riser_state`] only if the feature `coverage` is enabled: the
//! released daemon has no recorder. The tables of the state machines list all transitions. If a
//! transition cannot be reached by any run, `unreached.txt` must list it with a reason.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Transitions that don't need to be reached. Each line has the state machine, two states and the
/// reason.
const UNREACHED: &str = include_str!("../unreached.txt");

/// Prefix of the reason if some seeds reach the transition.
const RARE: &str = "rare";

/// A transition of a state machine: the type of its state, and the names of the two states.
pub type Transition = [String; 3];

thread_local! {
    static NOTED: RefCell<BTreeMap<(&'static str, &'static str, String), u64>> =
        const { RefCell::new(BTreeMap::new()) };
}

/// Counts an event on this thread: its kind, name and outcome.
pub(crate) fn note(kind: &'static str, name: &'static str, outcome: &str) {
    NOTED.with_borrow_mut(|noted| {
        *noted.entry((kind, name, outcome.to_owned())).or_default() += 1;
    });
}

/// Transitions and events that were reached.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    transitions: BTreeSet<Transition>,
    noted: BTreeMap<(&'static str, &'static str, String), u64>,
}

impl Coverage {
    /// Calls a function that runs plans. Returns its result and the coverage on this thread.
    pub fn of<T>(f: impl FnOnce() -> T) -> (T, Self) {
        let before = NOTED.take();
        let (result, transitions) = recorded(f);
        let noted = NOTED.replace(before);
        (result, Self { transitions, noted })
    }

    /// Adds the coverage of another thread.
    pub fn merge(&mut self, other: Self) {
        self.transitions.extend(other.transitions);
        for (row, count) in other.noted {
            *self.noted.entry(row).or_default() += count;
        }
    }

    /// Compares the coverage with the tables of all state machines, the list of reasons and these
    /// kinds of faults. Returns one line for each mistake.
    #[must_use]
    pub fn mistakes(&self, kinds: &[&str]) -> Vec<String> {
        let mut all = mistakes(&self.transitions, &table(TABLES), UNREACHED);
        all.extend(self.faults_missing(kinds));
        all
    }

    /// Returns one line for each of these kinds of faults that was not started by any run.
    #[must_use]
    pub fn faults_missing(&self, kinds: &[&str]) -> Vec<String> {
        let has_begun = |kind: &str| {
            let mut rows = self.noted.keys();
            rows.any(|(what, name, outcome)| {
                (*what, *name, &outcome[..]) == ("fault", kind, "begins")
            })
        };
        let missing = kinds.iter().filter(|kind| !has_begun(kind));
        missing
            .map(|kind| format!("fault never started: {kind}"))
            .collect()
    }
}

#[cfg(feature = "coverage")]
fn recorded<T>(f: impl FnOnce() -> T) -> (T, BTreeSet<Transition>) {
    let (result, taken) = riser_state::testing::recorded(f);
    let own = |name: riser_state::testing::Name| name.as_str().to_owned();
    let taken = taken.into_iter();
    let taken = taken.map(|(machine, from, to)| [machine.to_owned(), own(from), own(to)]);
    (result, taken.collect())
}

#[cfg(not(feature = "coverage"))]
fn recorded<T>(f: impl FnOnce() -> T) -> (T, BTreeSet<Transition>) {
    (f(), BTreeSet::new())
}

#[cfg(feature = "coverage")]
const TABLES: &str = riser_state::testing::TABLES;

#[cfg(not(feature = "coverage"))]
const TABLES: &str = "";

/// Parses the tables of state machines.
fn table(text: &str) -> BTreeSet<Transition> {
    let (mut all, mut machine) = (BTreeSet::new(), "");
    for line in text.lines() {
        let Some((from, next)) = line
            .trim()
            .split_once(':')
            .filter(|_| line.starts_with(' '))
        else {
            machine = line;
            continue;
        };
        let next = next.split_whitespace();
        all.extend(next.map(|to| [machine, from, to].map(str::to_owned)));
    }
    all
}

/// Compares the recorded transitions with all transitions and with the reasons for unreached ones.
fn mistakes(
    taken: &BTreeSet<Transition>,
    all: &BTreeSet<Transition>,
    reasons: &str,
) -> Vec<String> {
    let lines = reasons
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty());
    let reasons: BTreeMap<&str, &str> = lines.filter_map(|line| line.split_once(": ")).collect();
    let name = |[machine, from, to]: &Transition| format!("{machine} {from} -> {to}");
    let unknown = taken.difference(all).map(name);
    let unknown = unknown.map(|row| format!("unknown transition was taken: {row}"));
    let missing = all.difference(taken).map(name);
    let missing = missing.filter(|row| !reasons.contains_key(&row[..]));
    let missing =
        missing.map(|row| format!("transition was never taken, and has no reason: {row}"));
    let (all, taken): (BTreeSet<_>, BTreeSet<_>) = (
        all.iter().map(name).collect(),
        taken.iter().map(name).collect(),
    );
    let wrong = reasons.iter().filter_map(|(row, reason)| {
        let is_taken = taken.contains(*row) && !reason.starts_with(RARE);
        match (all.contains(*row), is_taken) {
            (false, _) => Some(format!("reason for an unknown transition: {row}")),
            (true, true) => Some(format!("transition was taken, but has a reason: {row}")),
            (true, false) => None,
        }
    });
    unknown.chain(missing).chain(wrong).collect()
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = table(TABLES);
        let machines: BTreeSet<_> = all.iter().map(|[machine, ..]| machine).collect();
        for machine in machines {
            let of = |set: &BTreeSet<Transition>| {
                let rows = set.iter().filter(|row| row[0] == *machine);
                rows.cloned().collect::<BTreeSet<_>>()
            };
            let (taken, all) = (of(&self.transitions), of(&all));
            let states = |set: &BTreeSet<Transition>| {
                let names = set.iter().flat_map(|[_, from, to]| [from, to]);
                names.collect::<BTreeSet<_>>().len()
            };
            writeln!(
                f,
                "{:>3} of {:>3} states, {:>3} of {:>3} transitions  {}",
                states(&taken),
                states(&all),
                taken.intersection(&all).count(),
                all.len(),
                machine
            )?;
        }
        for ((kind, name, outcome), count) in &self.noted {
            writeln!(f, "{count:>10}  {kind} {name}: {outcome}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "a::B\n  On: Off Broken\n  Off:\nc::D\n  Up: Up\n";

    fn row(words: &str) -> Transition {
        let mut words = words.split(' ').map(str::to_owned);
        std::array::from_fn(|_| words.next().unwrap())
    }

    #[test]
    fn tables_are_read() {
        let rows = ["a::B On Broken", "a::B On Off", "c::D Up Up"].map(row);
        assert_eq!(table(TABLE), rows.into());
    }

    #[test]
    fn unstarted_fault_is_reported() {
        let ((), reached) = Coverage::of(|| {
            note("fault", "deaf", "begins");
            note("change", "mute", "begins");
        });
        assert_eq!(reached.faults_missing(&["deaf"]), [""; 0]);
        assert_eq!(
            reached.faults_missing(&["deaf", "mute"]),
            ["fault never started: mute"]
        );
    }

    #[test]
    fn only_unreached_transitions_need_reasons() {
        let all = table(TABLE);
        let taken = [row("a::B On Off"), row("c::D Up Up")].into();
        let broken = "# words\n\na::B On -> Broken: nothing breaks\n";
        assert_eq!(mistakes(&taken, &all, broken), [""; 0]);
        let missing = ["transition was never taken, and has no reason: a::B On -> Broken"];
        assert_eq!(mistakes(&taken, &all, ""), missing);
        assert_eq!(
            mistakes(&all, &all, broken),
            ["transition was taken, but has a reason: a::B On -> Broken"]
        );
        assert_eq!(
            mistakes(&all, &all, "a::B Off -> On: no\n"),
            ["reason for an unknown transition: a::B Off -> On"]
        );
        assert_eq!(mistakes(&all, &all, "a::B On -> Broken: rare\n"), [""; 0]);
        assert_eq!(
            mistakes(&all, &table("a::B\n  On: Off\nc::D\n  Up: Up\n"), ""),
            ["unknown transition was taken: a::B On -> Broken"]
        );
    }
}
