//! Simulates a power failure at any point while the state directory is updated.
//!
//! We use strace to record the file system calls while the daemon makes changes. Based on this, a
//! model of the file system tracks which data has reached stable storage: POSIX only guarantees
//! this for data after fsync(2) was called for the file, and for names after fsync(2) was called
//! for their directory. Anything else may or may not be present: each name can change separately,
//! and a file can contain its previous data, no data, a part of the data, or zeroes. We create the
//! directory with one of these states and start a daemon. It must load the state either before or
//! after the pending change, including all changes that were acknowledged before.
//!
//! `RISER_CRASH_CUTS` sets the number of points to test (default 8; limited to the number of
//! points).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use riser_testkit::programs::{missing, skip};
use riser_tests::load::{Chance, setting};

use crate::daemon::Daemon;
use crate::state::{Kept, change, kept_by};

const ADDRESS: &str = "127.0.210.1:3260";

/// Number of random states per point, in addition to the states with all and with none of the
/// unstable data.
const ANY: usize = 2;

/// A file system call supported by the model. Files are identified by path, and open files by
/// descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Open {
        path: String,
        flags: String,
        fd: u64,
    },
    Write {
        fd: u64,
        bytes: Vec<u8>,
    },
    Sync {
        fd: u64,
    },
    Rename {
        from: String,
        to: String,
    },
    Link {
        from: String,
        to: String,
    },
    Unlink(String),
    MakeDir(String),
}

/// A successful call, and the size of the trace after this call.
#[derive(Clone, Debug)]
struct Event {
    call: Call,
    end: u64,
}

/// Parses the output of `strace -f -y`. Returns all calls for files in a directory, in the order of
/// completion.
fn events(trace: &str, dir: &Path) -> Vec<Event> {
    let mut events = Vec::new();
    let mut unfinished = BTreeMap::new();
    let mut end = 0;
    for line in trace.split_inclusive('\n') {
        end += line.len() as u64;
        let Some((thread, call)) = line.trim_end().split_once(' ') else {
            continue;
        };
        let call = call.trim_start();
        let call = match call.strip_prefix("<... ") {
            Some(rest) => {
                let (_, rest) = rest.split_once(" resumed>").expect("how strace goes on");
                let begin: String = unfinished.remove(thread).unwrap_or_default();
                begin + rest
            }
            None => call.to_owned(),
        };
        match call.strip_suffix(" <unfinished ...>") {
            Some(begin) => drop(unfinished.insert(thread.to_owned(), begin.to_owned())),
            None => events.extend(parsed(&call, dir).map(|call| Event { call, end })),
        }
    }
    events
}

/// Parses a successful call for a path in this directory. Other calls are ignored by the model.
///
/// # Panics
/// Panics if this call changes a file in a way that is not supported by the model.
fn parsed(line: &str, dir: &Path) -> Option<Call> {
    let dir = dir.to_str().unwrap();
    let (name, rest) = line.split_once('(')?;
    // The result is in a separate column.
    let (args, result) = rest.rsplit_once(" = ")?;
    let args = args.trim_end().strip_suffix(')')?;
    if result.starts_with('-') || !line.contains(dir) {
        return None;
    }
    let texts: Vec<_> = quoted(args);
    let path = |at: usize| String::from_utf8(texts[at].clone()).expect("paths here are UTF-8");
    // The first argument's descriptor and its path.
    let (number, fd_path) = args.split_once('<').unwrap_or((args, ""));
    let is_below = fd_path.starts_with(dir);
    let fd = number.parse().ok();
    let call = match name {
        "open" | "openat" => Call::Open {
            path: path(0),
            flags: args.rsplit_once('"')?.1.to_owned(),
            fd: result.split('<').next()?.parse().ok()?,
        },
        "write" if is_below => Call::Write {
            fd: fd?,
            bytes: texts.into_iter().next()?,
        },
        "fsync" | "fdatasync" if is_below => Call::Sync { fd: fd? },
        "rename" | "renameat" | "renameat2" => Call::Rename {
            from: path(0),
            to: path(1),
        },
        "link" | "linkat" => Call::Link {
            from: path(0),
            to: path(1),
        },
        "unlink" | "unlinkat" => Call::Unlink(path(0)),
        "mkdir" | "mkdirat" => Call::MakeDir(path(0)),
        "ftruncate" | "pwrite64" | "writev" | "pwritev" | "fallocate" if is_below => {
            panic!("not in the model: {line}")
        }
        _ => return None,
    };
    Some(call)
}

/// Parses all strings, which use C syntax.
fn quoted(args: &str) -> Vec<Vec<u8>> {
    let mut texts = Vec::new();
    let mut bytes = args.bytes().peekable();
    while bytes.any(|b| b == b'"') {
        let mut text = Vec::new();
        while let Some(byte) = bytes.next().filter(|b| *b != b'"') {
            if byte != b'\\' {
                text.push(byte);
                continue;
            }
            let escaped = bytes.next().expect("something behind it");
            text.push(match escaped {
                b'n' => b'\n',
                b't' => b'\t',
                b'r' => b'\r',
                b'f' => 12,
                b'v' => 11,
                b'0'..=b'7' => {
                    let mut value = escaped - b'0';
                    let is_digit = |b: &u8| matches!(b, b'0'..=b'7');
                    for _ in 0..2 {
                        let Some(digit) = bytes.next_if(is_digit) else {
                            break;
                        };
                        value = value << 3 | (digit - b'0');
                    }
                    value
                }
                other => other,
            });
        }
        texts.push(text);
    }
    texts
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Directory,
    File(usize),
}

/// Names in a file system.
type Names = BTreeMap<PathBuf, Node>;

/// A change to the names in a directory, which must be atomic.
#[derive(Clone, Debug)]
struct Renaming {
    directory: PathBuf,
    away: Option<PathBuf>,
    there: Option<(PathBuf, Node)>,
}

impl Renaming {
    fn apply(&self, names: &mut Names) {
        if let Some(path) = &self.away {
            names.remove(path);
        }
        if let Some((path, node)) = &self.there {
            names.insert(path.clone(), *node);
        }
    }
}

#[derive(Clone, Debug, Default)]
struct File {
    now: Vec<u8>,
    stable: Vec<u8>,
}

/// File used by an open descriptor.
#[derive(Clone, Debug)]
enum Opened {
    Directory(PathBuf),
    File(usize, usize),
}

/// Selects which of the unstable data should be present.
enum Luck<'a> {
    Nothing,
    All,
    Some(&'a mut Chance),
}

/// The current state of a file system, and its stable state.
#[derive(Clone, Debug, Default)]
struct Model {
    files: Vec<File>,
    now: Names,
    stable: Names,
    waiting: Vec<Renaming>,
    open: BTreeMap<u64, Opened>,
}

/// Contents of a directory: maps each file to its data, and each directory to `None`.
type Content = BTreeMap<PathBuf, Option<Vec<u8>>>;

impl Model {
    /// Creates a file system with a single directory.
    fn new(dir: &Path) -> Self {
        let names = Names::from([(dir.to_owned(), Node::Directory)]);
        Self {
            now: names.clone(),
            stable: names,
            ..Self::default()
        }
    }

    fn rename(&mut self, away: Option<&str>, there: Option<(&str, Node)>) {
        let path = away.or(there.map(|(path, _)| path)).expect("a name");
        let renaming = Renaming {
            directory: Path::new(path).parent().expect("a path").to_owned(),
            away: away.map(PathBuf::from),
            there: there.map(|(path, node)| (path.into(), node)),
        };
        renaming.apply(&mut self.now);
        self.waiting.push(renaming);
    }

    fn apply(&mut self, call: &Call) {
        match call {
            Call::Open { path, flags, fd } => {
                self.open.remove(fd);
                let file = match self.now.get(Path::new(path)) {
                    Some(Node::Directory) => {
                        self.open.insert(*fd, Opened::Directory(path.into()));
                        return;
                    }
                    Some(Node::File(file)) => *file,
                    None if flags.contains("O_CREAT") => {
                        self.files.push(File::default());
                        let file = self.files.len() - 1;
                        self.rename(None, Some((path, Node::File(file))));
                        file
                    }
                    // This file existed before, or is not used by the daemon.
                    None => return,
                };
                if flags.contains("O_TRUNC") {
                    self.files[file].now.clear();
                }
                let at = match flags.contains("O_APPEND") {
                    true => self.files[file].now.len(),
                    false => 0,
                };
                self.open.insert(*fd, Opened::File(file, at));
            }
            Call::Write { fd, bytes } => {
                let Some(Opened::File(file, at)) = self.open.get_mut(fd) else {
                    panic!("{fd} is no file of the model");
                };
                let now = &mut self.files[*file].now;
                now.resize(now.len().max(*at + bytes.len()), 0);
                now[*at..*at + bytes.len()].copy_from_slice(bytes);
                *at += bytes.len();
            }
            Call::Sync { fd } => match self.open.get(fd) {
                Some(Opened::File(file, _)) => {
                    let file = &mut self.files[*file];
                    file.stable.clone_from(&file.now);
                }
                Some(Opened::Directory(path)) => {
                    let path = path.clone();
                    let waiting = std::mem::take(&mut self.waiting);
                    let (done, waiting) = waiting.into_iter().partition(|r| r.directory == path);
                    self.waiting = waiting;
                    let done: Vec<Renaming> = done;
                    done.iter().for_each(|r| r.apply(&mut self.stable));
                }
                None => {}
            },
            Call::Rename { from, to } => {
                // Sockets are not supported by the model.
                if let Some(node) = self.now.get(Path::new(from)).copied() {
                    self.rename(Some(from), Some((to, node)));
                }
            }
            Call::Link { from, to } => {
                if let Some(node) = self.now.get(Path::new(from)).copied() {
                    self.rename(None, Some((to, node)));
                }
            }
            Call::Unlink(path) => self.rename(Some(path), None),
            Call::MakeDir(path) => self.rename(None, Some((path, Node::Directory))),
        }
    }

    /// Returns the current contents.
    fn content(&self) -> Content {
        let content = |node: &Node| match node {
            Node::Directory => None,
            Node::File(file) => Some(self.files[*file].now.clone()),
        };
        let names = self.now.iter();
        names
            .map(|(path, node)| (path.clone(), content(node)))
            .collect()
    }

    /// Returns the contents after a power failure.
    fn cut(&self, mut luck: Luck<'_>) -> Content {
        let mut is_lucky = |most: u64| match &mut luck {
            Luck::Nothing => 0,
            Luck::All => most,
            Luck::Some(chance) => chance.below(most + 1),
        };
        let mut names = self.stable.clone();
        for renaming in &self.waiting {
            if is_lucky(1) == 1 {
                renaming.apply(&mut names);
            }
        }
        // If the name of a directory is lost, its contents are lost as well.
        let whole = names.clone();
        let is_there = |path: &PathBuf| {
            let mut above = path.ancestors().skip(1);
            above.all(|p| whole.contains_key(p) || self.stable.keys().all(|s| !p.starts_with(s)))
        };
        names.retain(|path, _| is_there(path));
        let mut content = Content::new();
        for (path, node) in names {
            let Node::File(file) = node else {
                content.insert(path, None);
                continue;
            };
            let File { now, stable } = &self.files[file];
            let bytes = match if now == stable { 3 } else { is_lucky(3) } {
                0 => stable.clone(),
                1 => now[..is_lucky(now.len() as u64) as usize].to_vec(),
                2 => vec![0; now.len()],
                _ => now.clone(),
            };
            content.insert(path, Some(bytes));
        }
        content
    }
}

/// Returns the contents of a directory, including the directory itself.
fn content_of(dir: &Path) -> Content {
    let mut content = Content::from([(dir.to_owned(), None)]);
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => content.extend(content_of(&entry.path())),
            false => {
                let bytes = fs::read(entry.path()).unwrap();
                content.insert(entry.path(), Some(bytes));
            }
        }
    }
    content
}

/// Changes that were recorded using strace.
struct Recorded {
    daemon: Daemon,
    events: Vec<Event>,
    /// All states in order, and the size of the trace when each was acknowledged.
    states: Vec<(u64, Kept)>,
}

impl Recorded {
    fn new() -> Self {
        let mut daemon = Daemon::new("cuts");
        let backends = "{ disk: { kind: ram, size: 1MiB } }";
        daemon.configure(ADDRESS, backends, "{ 0: disk }");
        let file = daemon.directory.join("trace");
        let calls = "trace=%file,write,pwrite64,writev,pwritev,fsync,fdatasync,ftruncate,fallocate";
        let args = [
            "-y",
            "-s",
            "1000000",
            "-e",
            calls,
            "-o",
            file.to_str().unwrap(),
        ];
        daemon.start(Some(&args.map(str::to_owned)));
        let mut states = vec![(0, Kept::FIRST)];
        let mut kept = Kept::FIRST;
        for _ in 0..2 {
            // The line is always written before the call returns.
            let show = |kept| states.push((fs::metadata(&file).unwrap().len(), kept));
            kept = change(&daemon, ADDRESS, kept, show);
        }
        assert_eq!(states.len(), 7, "all commands have responses");
        daemon.kill();
        let trace = fs::read(&file).unwrap();
        let trace = String::from_utf8(trace).expect("strace writes ASCII");
        let mut events = events(&trace, &daemon.directory);
        // The log has been opened before.
        events.retain(|event| !matches!(event.call, Call::Write { fd: ..=2, .. }));
        let recorded = Self {
            daemon,
            events,
            states,
        };
        let mut model = recorded.model();
        recorded.events.iter().for_each(|e| model.apply(&e.call));
        let mut content = model.content();
        let state = recorded.daemon.state();
        content.retain(|path, _| path.starts_with(&state));
        let there = content_of(&state);
        assert!(
            content == there,
            "the model is what there is: {:?}, {:?}",
            content.keys(),
            there.keys()
        );
        recorded
    }

    fn model(&self) -> Model {
        Model::new(&self.daemon.directory)
    }

    /// Returns the last state that was acknowledged before this trace size.
    fn acknowledged(&self, end: u64) -> usize {
        self.states.iter().take_while(|(at, _)| *at < end).count() - 1
    }

    /// Starts a daemon with these contents of the state directory. Returns an error if its state is
    /// not valid after the given state was acknowledged.
    fn violation(&mut self, content: &Content, acknowledged: usize) -> Option<String> {
        let state = self.daemon.state();
        let _ = fs::remove_dir_all(&state);
        for (path, bytes) in content.iter().filter(|(path, _)| path.starts_with(&state)) {
            match bytes {
                None => fs::create_dir(path).unwrap(),
                Some(bytes) => fs::write(path, bytes).unwrap(),
            }
        }
        self.daemon.start(None);
        let found = match self.daemon.has_ended() {
            true => Err("it does not start"),
            false => {
                let daemon = &self.daemon;
                catch_unwind(AssertUnwindSafe(|| kept_by(daemon, ADDRESS)))
                    .map_err(|_| "it does not serve")
            }
        };
        self.daemon.kill();
        let allowed = self.states[acknowledged..].iter().take(2);
        let mut allowed = allowed.map(|(_, kept)| *kept);
        let is_right = found.is_ok_and(|found| allowed.any(|kept| kept == found));
        let last = self.states[acknowledged].1;
        (!is_right).then(|| format!("{found:?}, although {last:?} was acknowledged"))
    }

    /// Returns the first error after an acknowledgement if some of the calls were skipped and all
    /// unstable data is lost.
    fn without(&mut self, mut is_missing: impl FnMut(&Model, &Call) -> bool) -> Option<String> {
        for acknowledged in 1..self.states.len() {
            let mut model = self.model();
            let until = self.states[acknowledged].0;
            for event in self.events.iter().filter(|event| event.end <= until) {
                if !is_missing(&model, &event.call) {
                    model.apply(&event.call);
                }
            }
            let violation = self.violation(&model.cut(Luck::Nothing), acknowledged);
            if violation.is_some() {
                return violation;
            }
        }
        None
    }
}

#[test]
fn power_cut_keeps_state_consistent() {
    if let Some(tool) = missing(&["strace"]) {
        return skip("crash cuts", &format!("{tool} is not installed"));
    }
    let most = setting("RISER_CRASH_CUTS", 8) as usize;
    let mut recorded = Recorded::new();
    let mut chance = Chance::new(1, 0xc);
    let events = recorded.events.clone();
    let step = events.len().div_ceil(most.max(1));
    let (mut model, mut seen, mut points) = (recorded.model(), BTreeSet::new(), 0);
    for (at, event) in events.iter().enumerate() {
        model.apply(&event.call);
        let next = events.get(at + 1).map_or(u64::MAX, |next| next.end);
        if at % step != step - 1 && at + 1 != events.len() {
            continue;
        }
        points += 1;
        let acknowledged = recorded.acknowledged(next);
        let mut states = vec![model.cut(Luck::Nothing), model.cut(Luck::All)];
        states.extend((0..ANY).map(|_| model.cut(Luck::Some(&mut chance))));
        for content in states {
            if seen.insert((acknowledged, content.clone())) {
                let violation = recorded.violation(&content, acknowledged);
                let names: Vec<_> = content.keys().collect();
                assert_eq!(violation, None, "after {:?}: {names:?}", event.call);
            }
        }
    }
    println!(
        "result: {points} of {} points, {} states of the directory",
        events.len(),
        seen.len()
    );
    // If one of the required calls is skipped, this must be detected.
    let is_of_file = |model: &Model, call: &Call| match call {
        Call::Sync { fd } => matches!(model.open.get(fd), Some(Opened::File(..))),
        _ => false,
    };
    let file = recorded.without(is_of_file);
    let names = recorded
        .without(|model, call| matches!(call, Call::Sync { .. }) && !is_of_file(model, call));
    println!("result: without fsync of files {file:?}, of directories {names:?}");
    assert!(file.is_some() && names.is_some(), "{file:?}, {names:?}");
}

mod model {
    use super::*;

    #[test]
    fn calls_are_read() {
        let dir = Path::new("/d");
        let trace = "7 openat(AT_FDCWD</>, \"/d/.f\", O_WRONLY|O_CREAT|O_EXCL, 0600) = 5</d/.f>\n\
            7 write(5</d/.f>, \"a\\n\\\"\\1x\", 5) = 5\n\
            7 fsync(5</d/.f> <unfinished ...>\n\
            8 write(9<socket:[1]>, \"/d/\", 3) = 3\n\
            7 <... fsync resumed>)             = 0\n\
            7 unlink(\"/d/g\") = -1 ENOENT (No such file or directory)\n\
            7 rename(\"/d/.f\", \"/d/f\") = 0\n";
        let calls: Vec<_> = events(trace, dir).into_iter().map(|e| e.call).collect();
        let expected = [
            Call::Open {
                path: "/d/.f".into(),
                flags: ", O_WRONLY|O_CREAT|O_EXCL, 0600".into(),
                fd: 5,
            },
            Call::Write {
                fd: 5,
                bytes: b"a\n\"\x01x".to_vec(),
            },
            Call::Sync { fd: 5 },
            Call::Rename {
                from: "/d/.f".into(),
                to: "/d/f".into(),
            },
        ];
        assert_eq!(calls, expected);
    }

    /// Returns all possible final contents of a name.
    fn possible(calls: &[Call]) -> BTreeSet<Option<Vec<u8>>> {
        let mut model = Model::new(Path::new("/d"));
        calls.iter().for_each(|call| model.apply(call));
        let mut chance = Chance::new(3, 3);
        let mut some = || model.cut(Luck::Some(&mut chance));
        let content = (0..200).map(|_| some().remove(Path::new("/d/f")).flatten());
        content.collect()
    }

    #[test]
    fn synced_data_is_present() {
        let open = |path: &str, fd| Call::Open {
            path: path.into(),
            flags: "O_CREAT".into(),
            fd,
        };
        let bytes = b"ab".to_vec();
        let mut calls = vec![
            open("/d/.f", 5),
            Call::Write { fd: 5, bytes },
            Call::Sync { fd: 5 },
            Call::Rename {
                from: "/d/.f".into(),
                to: "/d/f".into(),
            },
        ];
        let whole = Some(b"ab".to_vec());
        assert_eq!(possible(&calls), [None, whole.clone()].into());
        calls.extend([open("/d", 6), Call::Sync { fd: 6 }]);
        assert_eq!(possible(&calls), [whole].into());
        calls.remove(2);
        let torn = ["", "a", "ab", "\0\0"].map(|text| Some(text.into()));
        assert_eq!(possible(&calls), torn.into());
    }
}
