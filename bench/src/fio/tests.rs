use std::time::Duration;

use super::super::job::{Access, Amount, BlockSizes, Pattern};
use super::*;

fn variable(name: &str) -> Option<String> {
    (name == "SIZE").then(|| "64m".to_owned())
}

fn included(path: &Path) -> io::Result<String> {
    match path.to_str() {
        Some("dir/common.inc") => Ok("rw=randwrite\ninclude more.inc\n".into()),
        Some("dir/more.inc") => Ok("iodepth=8\n[b]\nbs=8k\n".into()),
        Some("loop.inc") => Ok("include loop.inc\n".into()),
        Some("twice.inc") => Ok("include twice.inc\n".repeat(2)),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

fn sources(has_address: bool) -> Sources<'static> {
    Sources {
        env: &variable,
        read: &included,
        has_address,
    }
}

fn parsed(text: &str) -> Result<JobFile, JobFileErrors> {
    parse("test.fio", text, &sources(false))
}

fn refused(text: &str) -> String {
    parsed(text).unwrap_err().to_string()
}

#[test]
fn sections_inherit_previous_globals() {
    let file = parsed(
        "; header\n# another\n[global]\nioengine=libaio\nbs = 8k ; two pages\ntime_based\n\
         runtime=2m\n\n[first]\nrw=randread\nsize=${SIZE}\n[global]\niodepth=16\n\
         [second]\nrw=write:64k\nsize=50%\n",
    )
    .unwrap();
    let [group] = file.groups.as_slice() else {
        panic!("one group")
    };
    let [first, second] = group.as_slice() else {
        panic!("two jobs")
    };
    assert_eq!(
        (first.name.as_str(), second.name.as_str()),
        ("first", "second")
    );
    assert_eq!((first.iodepth, second.iodepth), (1, 16));
    assert_eq!(first.sizes[0], BlockSizes::Fixed(8192));
    assert_eq!(
        (first.access, first.pattern),
        (Access::Read, Pattern::Random)
    );
    assert_eq!(first.size, Some(Amount::Bytes(64 << 20)));
    assert_eq!(second.size, Some(Amount::Percent(50)));
    assert_eq!(second.modifier, 65536);
    assert!(first.time_based && second.time_based);
    assert_eq!(first.runtime, Some(Duration::from_secs(120)));
    let ignored: Vec<_> = file
        .ignored
        .iter()
        .map(|(p, n)| (p.line, n.as_str()))
        .collect();
    assert_eq!(ignored, [(4, "ioengine")]);
}

#[test]
fn stonewall_starts_new_group() {
    let file = parsed("[a]\nstonewall\n[b]\nrw=write\n[c]\nwait_for_previous\n[d]\n").unwrap();
    let names = |group: &Vec<Job>| group.iter().map(|j| j.name.clone()).collect::<String>();
    assert_eq!(
        file.groups.iter().map(names).collect::<Vec<_>>(),
        ["ab", "cd"]
    );
}

#[test]
fn kb_base_changes_size_units() {
    let file = parsed("[global]\nkb_base=1000\n[a]\nbs=4ki\nio_size=8k\n").unwrap();
    let job = &file.groups[0][0];
    assert_eq!(job.sizes[0], BlockSizes::Fixed(4096));
    assert_eq!(job.io_size, Some(Amount::Bytes(8000)));
    assert_eq!(file.kb_base, Some(KbBase::Decimal));
    let mixed = parsed("[a]\nbs=4k\n[b]\nkb_base=1000\n").unwrap();
    assert_eq!(mixed.kb_base, None);
}

#[test]
fn error_names_file_line_and_reason() {
    assert_eq!(
        refused("[a]\nrw=read\nmax_latency=5\nbs=4k\nfrob=1\n"),
        "test.fio:3: option `max_latency` is not supported: a late operation does not abort a run\n\
         test.fio:5: unknown option `frob`"
    );
    assert!(refused("[a]\nfrob=1\n").contains("test.fio:2: unknown option `frob`"));
    assert!(refused("rw=read\n").contains(":1: option `rw` precedes the first section"));
    assert!(refused("[a\n").contains("invalid section `[a`"));
    assert!(refused("[a]\nbs=4q\n").contains(":2: `4q` is not a size"));
    assert!(refused("[a]\nsize=${NOWHERE}\n").contains("variable `NOWHERE` is not set"));
    assert!(refused("[a]\nsize=${SIZE\n").contains("closing brace"));
    assert!(refused("[global]\nbs=4k\n").contains("missing job"));
    assert!(refused("[a]\nstate=x\n").contains("unknown option `state`"));
    let include = refused("[a]\ninclude other.fio\n");
    assert!(
        include.contains(":2: cannot read the included file other.fio: "),
        "{include}"
    );
    assert!(refused("[a]\ninclude\n").contains("missing file name after `include`"));
    assert!(refused("[a]\ninclude loop.inc\n").contains("loop.inc:1: `include loop.inc` exceeds"));
}

/// Otherwise the number of included files would double with each level.
#[test]
fn recursive_includes_stop_at_limit() {
    let errors = parsed("[a]\ninclude twice.inc\nfrob=1\n").unwrap_err();
    assert_eq!(errors.0.len(), 1, "{errors}");
    assert!(
        errors
            .to_string()
            .contains("exceeds the limit of 64 included files"),
        "{errors}"
    );
}

#[test]
fn included_files_continue_their_section() {
    let text = "[global]\nbs=4k\n[a]\ninclude common.inc\nsize=1m\n";
    let file = parse("dir/test.fio", text, &sources(false)).unwrap();
    let [a, b] = file.groups[0].as_slice() else {
        panic!("two jobs")
    };
    assert_eq!(
        (a.access, a.iodepth, a.name.as_str()),
        (Access::Write, 8, "a")
    );
    assert_eq!(
        (b.access, b.max_block(), b.name.as_str()),
        (Access::Read, 8192, "b")
    );
    assert_eq!((a.size, b.size), (None, Some(Amount::Bytes(1 << 20))));
}

#[test]
fn address_replaces_files_and_directories() {
    let text = "[global]\ndirectory=/mnt/test\n[a]\nfilename=/a:/b\n[b]\nfilename=fio.file.1\n";
    let file = parse("test.fio", text, &sources(true)).unwrap();
    assert_eq!(
        file.replaced,
        [
            "directory=/mnt/test",
            "filename=/a:/b",
            "filename=fio.file.1"
        ]
    );
    let mut jobs = file.groups.iter().flatten();
    assert!(jobs.all(|job| job.filename.is_none()));
    let without = refused(text);
    assert!(without.contains("an address on the command line replaces the directory"));
    assert_eq!(without.lines().count(), 2, "{without}");
}

#[test]
fn filesize_limits_region() {
    let size = |text: &str| parsed(&format!("[a]\n{text}")).unwrap().groups[0][0].size;
    assert_eq!(size("filesize=1m\n"), Some(Amount::Bytes(1 << 20)));
    assert_eq!(size("size=4m\nfilesize=1m\n"), Some(Amount::Bytes(1 << 20)));
    assert_eq!(size("filesize=4m\nsize=1m\n"), Some(Amount::Bytes(1 << 20)));
    assert_eq!(
        size("filesize=4m\nsize=50%%\n"),
        Some(Amount::Bytes(2 << 20))
    );
    assert!(refused("[a]\nfilesize=1m-4m\n").contains("only a single size is supported"));
}

/// Returns a directory of job files, which are similar to published ones.
fn published(directory: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fio");
    let entries = std::fs::read_dir(root.join(directory)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|ext| ext == "fio"))
        .collect()
}

/// Parses one of these job files in the same way as `riser bench --job-file` with an address.
fn parse_published(path: &Path) -> Result<JobFile, String> {
    let read = |path: &Path| std::fs::read_to_string(path);
    let sources = Sources {
        env: &variable,
        read: &read,
        has_address: true,
    };
    parse(path.to_str().unwrap(), &read(path).unwrap(), &sources).map_err(|e| e.to_string())
}

/// Returns fio's result for a job file, or `None` if fio is not installed.
fn check_with_fio(path: &Path, option: &str) -> Option<Result<String, String>> {
    let fio = std::process::Command::new("fio")
        .arg(option)
        .arg(path)
        .current_dir(path.parent().unwrap())
        .env("SIZE", "64m")
        .output();
    match fio {
        Ok(output) if output.status.success() => {
            Some(Ok(String::from_utf8_lossy(&output.stdout).into_owned()))
        }
        Ok(output) => Some(Err(String::from_utf8_lossy(&output.stderr).into_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => panic!("{e}"),
    }
}

/// fio also accepts each of these files and finds the same jobs.
#[test]
fn published_shapes_are_accepted() {
    let paths = published("");
    assert_eq!(paths.len(), 18);
    for path in paths {
        let file = parse_published(&path).unwrap_or_else(|e| panic!("{e}"));
        let jobs = file.groups.iter().flatten();
        let names: Vec<_> = jobs.map(|job| format!("--name={}", job.name)).collect();
        let Some(checked) = check_with_fio(&path, "--parse-only") else {
            continue;
        };
        checked.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let command = check_with_fio(&path, "--showcmd").unwrap().unwrap();
        let words = command.split_whitespace();
        // A global `name=` is printed before the names of the sections.
        let sections: Vec<_> = words.filter(|word| word.starts_with("--name=")).collect();
        let last = &sections[sections.len().saturating_sub(names.len())..];
        assert_eq!(last, names, "{}", path.display());
    }
}

/// fio also rejects each of these files. Their first lines contain the reason.
#[test]
fn invalid_files_fail_as_in_fio() {
    let paths = published("invalid");
    assert_eq!(paths.len(), 10);
    for path in paths {
        assert_refused(&path);
        if let Some(checked) = check_with_fio(&path, "--parse-only") {
            assert!(checked.is_err(), "{}: fio accepts it", path.display());
        }
    }
}

/// fio accepts these files: they use options not supported by `riser`, or contain mistakes that fio
/// ignores.
#[test]
fn unsupported_files_fail() {
    let paths = published("refused");
    assert_eq!(paths.len(), 12);
    for path in paths {
        assert_refused(&path);
        if let Some(checked) = check_with_fio(&path, "--parse-only") {
            checked.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        }
    }
}

fn assert_refused(path: &Path) {
    let text = std::fs::read_to_string(path).unwrap();
    let reason = text.lines().next().unwrap().strip_prefix("; refused: ");
    let reason = reason.expect("a first line with the reason");
    let why = parse_published(path).unwrap_err();
    assert!(why.contains(reason), "{}: {why}", path.display());
}
