//! What the tests of a machine need, and a recorder of transitions.

use std::any::type_name;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::{self, Debug, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::sync::{LazyLock, Mutex, PoisonError};

use super::State;

/// The tables of all machines: the name of a type, and below it a line for each state with those
/// that may follow it. [`table`] holds them against the machines.
pub const TABLES: &str = include_str!("../tables.txt");

/// A transition: the name of the machine's type, and of its states before and after.
pub type Transition = (&'static str, Name, Name);

thread_local! {
    /// The transitions of this thread, while they are recorded.
    static TAKEN: RefCell<Option<BTreeSet<Transition>>> = const { RefCell::new(None) };
}

/// Name of the variable with a file's path: a process that has it appends each transition to that
/// file when it takes it first, as three words of a line.
pub const FILE: &str = "RISER_TRANSITIONS";

/// That file, and what is in it.
static WRITTEN: LazyLock<Option<Mutex<Written>>> = LazyLock::new(|| {
    let path = std::env::var_os(FILE)?;
    let file = File::options().create(true).append(true).open(path).ok()?;
    let transitions = BTreeSet::new();
    Some(Mutex::new(Written { file, transitions }))
});

struct Written {
    file: File,
    transitions: BTreeSet<Transition>,
}

fn write_first(transition: impl FnOnce() -> Transition) {
    let Some(written) = &*WRITTEN else {
        return;
    };
    let mut written = written.lock().unwrap_or_else(PoisonError::into_inner);
    let (machine, from, to) = transition();
    if written.transitions.insert((machine, from, to)) {
        let line = format!("{machine} {} {}\n", from.as_str(), to.as_str());
        // A line less is no reason to end the process that is looked at.
        let _ = written.file.write_all(line.as_bytes());
    }
}

pub(super) fn record<S: Debug>(from: &S, to: &S) {
    write_first(|| (machine::<S>(), Name::of(from), Name::of(to)));
    // A thread that ends may have lost it already.
    let _ = TAKEN.try_with(|taken| {
        if let Some(taken) = &mut *taken.borrow_mut() {
            taken.insert((machine::<S>(), Name::of(from), Name::of(to)));
        }
    });
}

/// Names a machine by the type of its states, without generic arguments.
fn machine<S>() -> &'static str {
    let name = type_name::<S>();
    name.split('<').next().unwrap_or(name)
}

/// Calls a function; returns its result, and the transitions that it took on this thread.
pub fn recorded<T>(f: impl FnOnce() -> T) -> (T, BTreeSet<Transition>) {
    let before = TAKEN.replace(Some(BTreeSet::new()));
    let result = f();
    let taken = TAKEN.replace(before);
    (result, taken.unwrap_or_default())
}

/// The name of a state's variant, without what it carries, unless that is a variant as well.
/// Recorders make many, so it is cut off before it is rendered as a whole, and allocates nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    bytes: [u8; 40],
    len: usize,
}

impl Name {
    fn of(state: &impl Debug) -> Self {
        let mut name = Self {
            bytes: [0; 40],
            len: 0,
        };
        // An error says that the rest of the text is not wanted.
        let is_plain = write!(name, "{state:?}").is_ok();
        let is_plain = is_plain && !name.as_str().contains(|c: char| c.is_ascii_digit());
        if let Some(at) = name.as_str().find('(')
            && !is_plain
        {
            // Names are compared with all of their bytes.
            name.bytes[at..].fill(0);
            name.len = at;
        }
        name
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).expect("made of letters")
    }
}

impl fmt::Write for Name {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            let is_wanted = byte.is_ascii_alphanumeric() || byte == b'(' || byte == b')';
            if !is_wanted || self.len == self.bytes.len() {
                return Err(fmt::Error);
            }
            self.bytes[self.len] = byte;
            self.len += 1;
        }
        Ok(())
    }
}

impl Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Renders a machine's table: a line for each state, with the states that may follow it.
///
/// # Panics
/// If it is not in [`TABLES`], from which simulations know what there is to reach.
pub fn table<S: State>(all: &[S]) -> String {
    let row = |from: &S| {
        let next = all.iter().filter(|to| from.may_become(to)).map(Name::of);
        let next: Vec<_> = next.map(|to| to.as_str().to_owned()).collect();
        format!("{}: {}\n", Name::of(from).as_str(), next.join(" "))
    };
    let rows: Vec<String> = all.iter().map(row).collect();
    let lines = rows.iter().map(|row| format!("  {}\n", row.trim_end()));
    let name = std::iter::once(format!("{}\n", machine::<S>()));
    let block: String = name.chain(lines).collect();
    assert!(
        TABLES.contains(&block),
        "state/tables.txt is to have:\n{block}"
    );
    rows.concat()
}

/// Runs scripts and asserts that they take every transition of a machine's table.
///
/// # Panics
/// If they do not.
pub fn assert_all_taken<S: State>(all: &[S], scripts: impl FnOnce()) {
    let ((), taken) = recorded(scripts);
    let rows = all.iter().flat_map(|from| {
        let next = all.iter().filter(|to| from.may_become(to));
        next.map(|to| (machine::<S>(), Name::of(from), Name::of(to)))
    });
    let missing: Vec<_> = rows.filter(|row| !taken.contains(row)).collect();
    assert!(missing.is_empty(), "never taken: {missing:?}");
}
