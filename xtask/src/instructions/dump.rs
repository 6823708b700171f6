//! Parses callgrind dumps to get the instruction count by function and by source directory.
//!
//! A dump contains the file of each source line, even if the line was inlined to a function in a
//! different file. This means that our code is counted for its source directory no matter how it
//! was inlined. Library code is counted for the function it was inlined to.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

/// Name suffixes of the functions that a worker calls in every round of its loop.
static POLLING: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let lines = include_str!("../../cases/polling.txt").lines();
    lines.filter(|line| !line.starts_with('#')).collect()
});

/// Function that runs a single worker round.
const ROUND: &str = "riser_target::worker::Worker::step";

/// Instruction counts of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Dump {
    /// Instructions by function, not including callees and polling functions.
    pub(super) functions: BTreeMap<String, f64>,
    /// Instructions by source directory or by library.
    pub(super) groups: BTreeMap<String, f64>,
    /// Instructions in polling functions.
    pub(super) polling: f64,
    /// Number of worker rounds.
    pub(super) rounds: f64,
}

impl Dump {
    /// Parses a dump. `root` is the source directory of the program.
    ///
    /// # Errors
    /// Returns an error if this is not a valid dump or if it uses a different format, which we
    /// detect because the sum of all lines must be equal to the total.
    pub(super) fn parse(text: &str, root: &str) -> Result<Self, String> {
        let mut reader = Reader {
            root: root.trim_end_matches('/').to_owned(),
            ..Reader::default()
        };
        for line in text.lines() {
            reader
                .parse_line(line)
                .ok_or_else(|| format!("invalid callgrind line: `{line}`"))?;
        }
        reader.finish()
    }

    /// Returns the total number of instructions, excluding polling.
    pub(super) fn total(&self) -> f64 {
        self.groups.values().sum()
    }

    /// Returns the cost per operation, based on the difference to a shorter measurement. This
    /// removes the cost of login, logout and initialization.
    pub(super) fn difference(&self, shorter: &Self, operations: u64) -> Self {
        let each = |more: f64, less: f64| (more - less) / operations as f64;
        let all = |more: &BTreeMap<String, f64>, less: &BTreeMap<String, f64>| {
            // If a function is only used for login, both measurements have the same cost.
            let cost = |(name, cost): (&String, &f64)| {
                let cost = each(*cost, less.get(name).copied().unwrap_or(0.0));
                (name.clone(), cost)
            };
            more.iter().map(cost).collect()
        };
        Self {
            functions: all(&self.functions, &shorter.functions),
            groups: all(&self.groups, &shorter.groups),
            polling: each(self.polling, shorter.polling),
            rounds: each(self.rounds, shorter.rounds),
        }
    }
}

/// A function with the data parsed so far.
#[derive(Default)]
struct Function {
    /// Instructions in the function itself.
    own: u64,
    calls: u64,
    /// Library that contains the function, or `None` for our own code.
    library: Option<String>,
    /// Instructions of calls from polling functions, including callees.
    polled: u64,
}

#[derive(Default)]
struct Reader {
    root: String,
    names: HashMap<u32, String>,
    files: HashMap<u32, String>,
    functions: HashMap<String, Function>,
    groups: BTreeMap<String, u64>,
    /// Current function, its file, and the file of the next line.
    function: String,
    file: String,
    line_file: String,
    callee: String,
    /// If set, the next line contains the cost of this number of calls.
    calls: Option<u64>,
    has_events: bool,
    total: Option<u64>,
}

impl Reader {
    /// Parses a line. Returns `None` if the format is not supported.
    fn parse_line(&mut self, line: &str) -> Option<()> {
        let Some(first) = line.bytes().next() else {
            return Some(());
        };
        match first {
            b'#' => Some(()),
            b'0'..=b'9' | b'+' | b'-' | b'*' => self.take_cost(line),
            _ => {
                let (key, mark, value) = split_key(line)?;
                match mark {
                    ':' => self.take_header(key, value.trim()),
                    _ => self.take_position(key, value),
                }
            }
        }
    }

    fn take_header(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            // We don't support other events, because they would add columns.
            "events" => self.has_events = value == "Ir",
            "totals" => self.total = Some(value.parse().ok()?),
            _ => {}
        }
        Some(())
    }

    fn take_position(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "fl" => {
                self.file = named(&mut self.files, value)?;
                self.line_file = self.file.clone();
            }
            "fi" | "fe" => self.line_file = named(&mut self.files, value)?,
            "fn" => {
                self.function = without_recursion(&named(&mut self.names, value)?).to_owned();
                // The previous lines may have been for a different file.
                self.line_file = self.file.clone();
                let library = match ours(&self.root, &self.file) {
                    Some(_) => None,
                    None => Some(library(&self.file)),
                };
                let function = self.functions.entry(self.function.clone());
                function.or_default().library = library;
            }
            "cfn" => self.callee = without_recursion(&named(&mut self.names, value)?).to_owned(),
            // These are only read because they can define a name.
            "cfi" | "cfl" => drop(named(&mut self.files, value)?),
            "ob" | "cob" => {}
            "calls" => self.calls = Some(value.split(' ').next()?.parse().ok()?),
            _ => return None,
        }
        Some(())
    }

    fn take_cost(&mut self, line: &str) -> Option<()> {
        let mut words = line.split_ascii_whitespace().skip(1);
        let cost = words.next().map_or(Some(0), |cost| cost.parse().ok())?;
        if let Some(calls) = self.calls.take() {
            // The callee has separate lines for these instructions.
            let polled = is_polling(&self.function) && !is_polling(&self.callee);
            let callee = self.functions.entry(self.callee.clone()).or_default();
            callee.calls += calls;
            callee.polled += if polled { cost } else { 0 };
            return Some(());
        }
        let function = self.functions.get_mut(&self.function)?;
        function.own += cost;
        if !is_polling(&self.function) {
            let group = self.group();
            *self.groups.entry(group).or_default() += cost;
        }
        Some(())
    }

    fn group(&self) -> String {
        let ours = ours(&self.root, &self.line_file).or_else(|| ours(&self.root, &self.file));
        ours.unwrap_or_else(|| library(&self.file))
    }

    fn finish(mut self) -> Result<Dump, String> {
        if !self.has_events {
            return Err("the dump must only count instructions".into());
        }
        let sum: u64 = self.functions.values().map(|function| function.own).sum();
        if self.total != Some(sum) {
            let total = self.total;
            return Err(format!(
                "the lines add up to {sum} instructions, but the total is {total:?}"
            ));
        }
        // Without our own groups, all calls from polling functions would be treated as library
        // calls.
        if !self.groups.keys().any(|group| group.contains('/')) {
            return Err(format!(
                "found no line of a source file below {}",
                self.root
            ));
        }
        let rounds = self.functions.get(ROUND).map_or(0, |round| round.calls);
        let mut polling = 0;
        let mut functions = BTreeMap::new();
        for (name, mut function) in self.functions {
            if is_polling(&name) {
                polling += function.own;
                continue;
            }
            if let Some(library) = function.library {
                // Library functions called by polling functions usually don't call other functions.
                let polled = function.polled.min(function.own);
                function.own -= polled;
                polling += polled;
                let group = self.groups.entry(library).or_default();
                *group = group.saturating_sub(polled);
            }
            functions.insert(name, function.own as f64);
        }
        let groups = self.groups.into_iter();
        Ok(Dump {
            functions,
            groups: groups.map(|(name, cost)| (name, cost as f64)).collect(),
            polling: polling as f64,
            rounds: rounds as f64,
        })
    }
}

fn split_key(line: &str) -> Option<(&str, char, &str)> {
    let at = line.find(['=', ':'])?;
    let (key, rest) = line.split_at(at);
    let mark = rest.chars().next()?;
    Some((key, mark, &rest[1..]))
}

/// Returns the name for `(number) name`. Later lines will only contain the number.
fn named(names: &mut HashMap<u32, String>, value: &str) -> Option<String> {
    let (number, name) = value.strip_prefix('(')?.split_once(')')?;
    let number = number.parse().ok()?;
    match name.strip_prefix(' ') {
        Some(name) => {
            names.insert(number, name.to_owned());
            Some(name.to_owned())
        }
        None => names.get(&number).cloned(),
    }
}

fn without_recursion(name: &str) -> &str {
    match name.rsplit_once('\'') {
        Some((name, depth)) if depth.parse::<u32>().is_ok() => name,
        _ => name,
    }
}

fn is_polling(function: &str) -> bool {
    POLLING.iter().any(|end| function.ends_with(end))
}

/// Returns the crate and the directory below `src` for our own files, for example `transport/rc`
/// for `transport/src/rc/qp.rs`.
fn ours(root: &str, file: &str) -> Option<String> {
    let path = file.strip_prefix(root)?.strip_prefix('/')?;
    let (of_crate, path) = path.split_once("/src/")?;
    let first = path.split('/').next()?;
    Some(format!("{of_crate}/{}", first.trim_end_matches(".rs")))
}

fn library(file: &str) -> String {
    // The standard library uses the paths of its build machine, or, if the component `rust-src` is
    // installed, the paths of its sources.
    if file.starts_with("/rustc/")
        || file.starts_with("/rust/deps/")
        || file.contains("/lib/rustlib/src/rust/")
    {
        return "std".to_owned();
    }
    // `…/registry/src/INDEX/CRATE-VERSION/…`
    let of_registry = file.split_once("/registry/src/").and_then(|(_, path)| {
        let directory = path.split('/').nth(1)?;
        directory.rsplit_once('-').map(|(name, _)| name.to_owned())
    });
    of_registry.unwrap_or_else(|| "libc and others".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses the callgrind format, with each name defined once, relative line numbers, and calls
    /// with their inclusive cost.
    const TEXT: &str = "# callgrind format\nversion: 1\npid: 7\n\
        cmd:  /w/.build/release/riserd run --config=/x\npart: 2\n\ndesc: Trigger: dump\n\n\
        positions: line\nevents: Ir\nsummary: 2350\n\n\
        ob=(1) /w/riserd\nfl=(1) /w/target/src/worker/mod.rs\n\
        fn=(1) riser_target::worker::Worker::step\n430 100\n\
        cfi=(2) /w/transport/src/rc/qp.rs\ncfn=(2) riser_transport::rc::qp::RcQp::poll\n\
        calls=3 10\n+2 1500\n\
        cob=(2) /lib/libc.so.6\ncfi=(5) ./string/memset.S\ncfn=(4) memset\ncalls=3 20\n* 60\n\n\
        fl=(2)\nfn=(2)\n10 700\n+1 100\nfi=(3) /rustc/59/library/core/src/option.rs\n20 200\n\
        fe=(2)\n12 50\n\
        fi=(4) /w/transport/memory/src/copy.rs\n7 400\ncfn=(2)\ncalls=1 7\n* 30\n\
        cfi=(5)\ncfn=(4)\ncalls=2 20\n7 50\n\n\
        fn=(3) riser_transport::rc::qp::RcQp::poll'2\n10 30\n\n\
        fl=(5)\nfn=(4)\n20 110\n\n\
        fl=(6) /c/registry/src/index-1/crc32fast-1.5.4/src/lib.rs\nfn=(5) crc32fast::run\n1 600\n\
        fi=(3)\n2 60\n\ntotals: 2350\n";

    fn costs(entries: &[(&str, f64)]) -> BTreeMap<String, f64> {
        let owned = |(name, cost): &(&str, f64)| ((*name).to_owned(), *cost);
        entries.iter().map(owned).collect()
    }

    #[test]
    fn lines_count_for_their_directory() {
        let dump = Dump::parse(TEXT, "/w").unwrap();
        let functions = [
            ("crc32fast::run", 660.0),
            ("memset", 50.0),
            ("riser_transport::rc::qp::RcQp::poll", 1480.0),
        ];
        assert_eq!(dump.functions, costs(&functions));
        let groups = [
            ("crc32fast", 660.0),
            ("libc and others", 50.0),
            ("transport/memory/copy", 400.0),
            // Inlined code from the standard library is counted for the caller.
            ("transport/rc", 1080.0),
        ];
        assert_eq!(dump.groups, costs(&groups));
        // This is a loop round, and the memory that is set to zero by it.
        assert_eq!(dump.polling, 160.0);
        assert_eq!(dump.total() + dump.polling, 2350.0);
    }

    #[test]
    fn standard_library_is_found_at_any_path() {
        let sources = "/home/u/.rustup/toolchains/stable/lib/rustlib/src/rust";
        for root in ["/rustc/59", sources] {
            let file = format!("{root}/library/core/src/option.rs");
            assert_eq!(library(&file), "std", "{file}");
        }
        assert_eq!(library("./string/memset.S"), "libc and others");
    }

    #[test]
    fn rounds_are_counted_by_step_calls() {
        let text = TEXT.replace(
            "ob=(1)",
            "fl=(1) /w/target/src/worker/mod.rs\nfn=(9) riser_target::worker::Worker::run\n\
             cfn=(1) riser_target::worker::Worker::step\ncalls=12 4\n1 1660\nob=(1)",
        );
        let dump = Dump::parse(&text, "/w/").unwrap();
        assert_eq!((dump.rounds, dump.polling), (12.0, 160.0));
    }

    #[test]
    fn invalid_dump_is_error() {
        let why = |text: &str| Dump::parse(text, "/w").unwrap_err();
        assert!(why(&TEXT.replace("totals: 2350", "totals: 2351")).contains("2351"));
        assert!(why(&TEXT.replace("totals: 2350", "")).contains("None"));
        assert!(why(&TEXT.replace("events: Ir", "events: Ir Dr")).contains("must only"));
        assert!(why(&TEXT.replace("430 100", "jump=3 430")).contains("jump=3"));
        assert!(why(&TEXT.replace("fl=(2)\n", "fl=(77)\n")).contains("fl=(77)"));
        assert!(why("1 2").contains("1 2"));
        let elsewhere = Dump::parse(TEXT, "/somewhere").unwrap_err();
        assert_eq!(elsewhere, "found no line of a source file below /somewhere");
    }

    #[test]
    fn operation_cost_is_run_difference() {
        let of = |login: f64, each: f64, operations: f64| Dump {
            functions: costs(&[("login", login), ("read", each * operations)]),
            groups: costs(&[("rc", login + each * operations)]),
            polling: 7.0 * operations,
            rounds: 2.0 * operations,
        };
        let cost = of(900.0, 30.0, 300.0).difference(&of(900.0, 30.0, 100.0), 200);
        assert_eq!(cost.functions, costs(&[("login", 0.0), ("read", 30.0)]));
        assert_eq!((cost.total(), cost.polling, cost.rounds), (30.0, 7.0, 2.0));
    }
}
