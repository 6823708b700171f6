//! Test support for state machines, including a recorder for transitions.

use std::any::type_name;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::{self, Debug, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::sync::{LazyLock, Mutex, PoisonError};

use super::State;

/// Tables of all state machines: the type name, followed by a line for each state with all valid
/// next states. [`table`] is used to verify this.
pub const TABLES: &str = include_str!("../tables.txt");

/// A transition: the type name of the state machine, the previous state and the new state.
pub type Transition = (&'static str, Name, Name);

thread_local! {
    /// Transitions of the current thread, if recording is enabled.
    static TAKEN: RefCell<Option<BTreeSet<Transition>>> = const { RefCell::new(None) };
}

/// Environment variable with the path of a file. If this is set, the process appends each new
/// transition to this file as a line with three words.
pub const FILE: &str = "RISER_TRANSITIONS";

/// The file and its current contents.
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
        // If a line can't be written, this should not affect the process.
        let _ = written.file.write_all(line.as_bytes());
    }
}

pub(super) fn record<S: Debug>(from: &S, to: &S) {
    write_first(|| (machine::<S>(), Name::of(from), Name::of(to)));
    // If the thread is about to exit, this may have been destroyed.
    let _ = TAKEN.try_with(|taken| {
        if let Some(taken) = &mut *taken.borrow_mut() {
            taken.insert((machine::<S>(), Name::of(from), Name::of(to)));
        }
    });
}

/// Returns the type name used for a state machine, without generic arguments.
fn machine<S>() -> &'static str {
    let name = type_name::<S>();
    name.split('<').next().unwrap_or(name)
}

/// Calls a function. Returns its result and all transitions made by this thread.
pub fn recorded<T>(f: impl FnOnce() -> T) -> (T, BTreeSet<Transition>) {
    let before = TAKEN.replace(Some(BTreeSet::new()));
    let result = f();
    let taken = TAKEN.replace(before);
    (result, taken.unwrap_or_default())
}

/// Name of an enum variant used as a state. Data is not included, unless it's also an enum variant.
/// A recorder creates many of these, so we stop formatting as early as possible and never allocate.
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
        // An error is used to indicate that we don't need the rest of the text.
        let is_plain = write!(name, "{state:?}").is_ok();
        let is_plain = is_plain && !name.as_str().contains(|c: char| c.is_ascii_digit());
        if let Some(at) = name.as_str().find('(')
            && !is_plain
        {
            // We need to clear the rest because all bytes are compared.
            name.bytes[at..].fill(0);
            name.len = at;
        }
        name
    }

    /// Returns the name as a string.
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

/// Formats the table of a state machine: a line for each state with all valid next states.
///
/// # Panics
/// Panics if this is not in [`TABLES`], because simulations use it to check their coverage.
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

/// Runs scripts and verifies that they cover all transitions of a state machine.
///
/// # Panics
/// Panics if a transition is not covered.
pub fn assert_all_taken<S: State>(all: &[S], scripts: impl FnOnce()) {
    let ((), taken) = recorded(scripts);
    let rows = all.iter().flat_map(|from| {
        let next = all.iter().filter(|to| from.may_become(to));
        next.map(|to| (machine::<S>(), Name::of(from), Name::of(to)))
    });
    let missing: Vec<_> = rows.filter(|row| !taken.contains(row)).collect();
    assert!(missing.is_empty(), "never taken: {missing:?}");
}
