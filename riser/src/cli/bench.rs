//! `riser bench`.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use riser_bench::fio::{JobFile, Sources};
use riser_bench::job::{Amount, COMMAND_LINE, Checksum, Content, KbBase, NOTED, Units};
use riser_bench::outcome::Outcome;
use riser_bench::output::{Machine, csv, fio as json, hdr, html, text};
use riser_bench::{Job, Progress, RunOptions, Task, fio};

use super::address::Address;
use super::args::{BenchArgs, BenchTarget, BenchVerb, Format, Global, WorkloadArgs};
use super::disk::{Disk, open};
use super::exit::{CliError, Exit};
use super::guard::{self, FileId};
use super::results::{FilesInUse, ResultFile, ResultFiles};
use super::sweep::Sweep;
use super::{compare, identity, output, units, wire};

/// Default duration of the measurement.
const RUNTIME: Duration = Duration::from_secs(10);

/// Default time before the measurement.
const WARM_UP: Duration = Duration::from_secs(1);

/// Maximum number of runs for a command. Results of at least one interval are stored for each run.
const MAX_RUNS: usize = 1000;

/// Default buffer size of a session in bytes.
const BUFFERS: u64 = 64 << 20;

/// Maximum buffer size of a session in bytes.
const MAX_BUFFERS: u64 = 16 << 30;

/// Reason why a device can only be opened once for writing.
const EXCLUSIVE: &str = "block devices are opened exclusively for writing";

pub(super) fn run(args: &BenchArgs, global: &Global) -> Result<(), CliError> {
    match &args.verb {
        Some(BenchVerb::Compare(args)) => compare::run(args, global),
        Some(BenchVerb::Wire(args)) => wire::run(args, global),
        None => measure(args, global),
    }
}

fn measure(args: &BenchArgs, global: &Global) -> Result<(), CliError> {
    let groups = groups(args)?;
    check_state(args, &groups)?;
    let files = ResultFiles::create(&args.results, |used| add_used(args, &groups, used))?;
    let disks = open_all(args, &groups, global)?;
    let jobs = groups.iter().flatten().count();
    let options = RunOptions {
        interval: args.interval,
        server_pid: args.server_pid,
        run: 0,
        // All results are kept in memory until they are written.
        memory: RunOptions::default().memory / jobs.max(1),
    };
    let tasks = groups.iter().map(|group| tasks(args, group, &disks));
    let tasks = tasks.collect::<Result<Vec<_>, _>>()?;
    // Validate all jobs before the first run. Otherwise an invalid job may only be reported hours
    // later.
    for group in &tasks {
        riser_bench::check(group, options)?;
    }
    let mut outcomes = Vec::new();
    let run = run_all(&tasks, options, global, &mut outcomes);
    // If a run fails, still output the results of previous runs.
    let emitted = match outcomes.is_empty() {
        true => Ok(()),
        false => emit(&outcomes, files, args.results.bins, global),
    };
    if run.is_ok() {
        for (_, disk) in &disks {
            disk.close();
        }
    }
    run.and(emitted)
}

/// Runs groups in order and stops at the first error.
fn run_all(
    tasks: &[Vec<Task<Disk>>],
    options: RunOptions,
    global: &Global,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CliError> {
    let line = output::status_line(global);
    let mut ended = Ok(());
    for (number, group) in tasks.iter().enumerate() {
        let title = title(group, number, tasks.len());
        let options = RunOptions {
            run: number as u64,
            ..options
        };
        match riser_bench::run(group, options, |p| line.set_message(live(&title, p))) {
            Ok(run) => outcomes.extend(run),
            Err(error) => {
                ended = Err(error.into());
                break;
            }
        }
    }
    line.finish_and_clear();
    ended
}

/// Creates tasks for the jobs in a group.
fn tasks(
    args: &BenchArgs,
    group: &[Job],
    disks: &[(Address, Arc<Disk>)],
) -> Result<Vec<Task<Disk>>, CliError> {
    let task = |job: &Job| {
        let address = address(args, job)?;
        let disks = disks.iter().filter(|(known, _)| *known == address);
        let devices = disks.map(|(_, disk)| disk.clone());
        let devices: Vec<_> = devices.take(job.sessions as usize).collect();
        Ok(Task {
            job: job.clone(),
            identity: identity::of(&address, devices.first()),
            rdma_device: devices.first().and_then(|disk| disk.device()),
            protection: devices.first().and_then(|disk| disk.protection()),
            address: address.to_string(),
            devices,
        })
    };
    group.iter().map(task).collect()
}

/// Fails if a state file is used for a disk in memory. It can't be verified because another command
/// would use a different disk.
fn check_state(args: &BenchArgs, groups: &[Vec<Job>]) -> Result<(), CliError> {
    for job in groups.iter().flatten().filter(|job| job.state.is_some()) {
        let address = address(args, job)?;
        if matches!(address, Address::Memory { .. }) {
            let what = format!("--state is not supported for {address}, which is not persistent");
            return Err(CliError::new(Exit::Usage, what));
        }
    }
    Ok(())
}

/// Adds files that must not be replaced by results.
fn add_used(args: &BenchArgs, groups: &[Vec<Job>], used: &mut FilesInUse) {
    if let BenchTarget::JobFile(path) = args.target() {
        used.add("the job file", path);
    }
    for job in groups.iter().flatten() {
        if let Some(path) = &job.state {
            used.add("the state file", path);
        }
        if let Ok(Address::File { path, .. }) = address(args, job) {
            used.add("the measured disk", &path);
        }
    }
}

/// Returns all jobs from the command line or job file, in groups that run sequentially. Each round
/// includes all combinations of the sweep.
fn groups(args: &BenchArgs) -> Result<Vec<Vec<Job>>, CliError> {
    let usage = |what: String| CliError::new(Exit::Usage, what);
    let (mut groups, form) = match args.target() {
        BenchTarget::Url(_) if args.url.is_some() => {
            let what = "two addresses require a job file, with a name ending in .fio, and a device";
            return Err(usage(what.into()));
        }
        BenchTarget::Url(_) => (Vec::new(), Units::CommandLine),
        BenchTarget::JobFile(path) => {
            let file = read_jobs(path, args)?;
            (file.groups, Units::Fio(base(file.kb_base, args)?))
        }
    };
    let sweeps = args.sweep.iter().map(|text| Sweep::parse(text, form));
    let sweeps = sweeps.collect::<Result<Vec<_>, _>>().map_err(usage)?;
    if matches!(args.target(), BenchTarget::Url(_)) {
        groups.push(vec![job(&args.workload, &sweeps).map_err(usage)?]);
    }
    set_options(args, &mut groups).map_err(usage)?;
    let mut all = Vec::new();
    for _ in 0..args.rounds {
        let mut round = groups.clone();
        for sweep in &sweeps {
            round = sweep.combine(&round, MAX_RUNS).map_err(usage)?;
        }
        all.extend(round);
        if all.len() > MAX_RUNS {
            return Err(usage(format!("more than {MAX_RUNS} runs")));
        }
    }
    check_layouts(&all).map_err(usage)?;
    Ok(all)
}

/// Sets command-line options that can also be used with job files. If only a state file is
/// verified, jobs without a state file are removed.
fn set_options(args: &BenchArgs, groups: &mut Vec<Vec<Job>>) -> Result<(), String> {
    let mut verified = 0;
    for job in groups.iter_mut().flatten() {
        job.sessions = args.sessions.unwrap_or(job.sessions);
        job.verify_only |= args.verify_only;
        if args.state.is_some()
            && (job.verify.is_some() || matches!(args.target(), BenchTarget::Url(_)))
        {
            verified += 1;
            job.state.clone_from(&args.state);
            job.verify = job.verify.or(Some(Checksum::Crc32c));
        }
    }
    if args.state.is_some() && verified != 1 {
        return Err(format!(
            "--state requires one job with verify, but the file has {verified}"
        ));
    }
    if args.verify_only {
        for group in &mut *groups {
            group.retain(|job| job.state.is_some());
        }
        groups.retain(|group| !group.is_empty());
    }
    Ok(())
}

/// Fails if a state file is used by multiple runs that are not compatible. Otherwise later runs
/// would only fail after previous runs have completed.
fn check_layouts(groups: &[Vec<Job>]) -> Result<(), String> {
    let layout = |job: &Job| {
        let is_apart = job.offset_increment != Amount::Bytes(0);
        let regions = if is_apart { job.numjobs } else { 1 };
        let place = (job.offset, job.size, job.offset_increment, regions);
        // Contents of verified blocks don't depend on this option.
        let content = Content {
            refill: false,
            ..job.content.clone()
        };
        let disk = job.filename.clone();
        (disk, job.min_block(), place, job.verify, content)
    };
    let mut known: Vec<(&Path, _)> = Vec::new();
    for job in groups.iter().flatten() {
        let Some(path) = job.state.as_deref() else {
            continue;
        };
        let layout = layout(job);
        match known.iter().find(|(other, _)| *other == path) {
            None => known.push((path, layout)),
            Some((_, first)) if *first == layout => {}
            Some(_) => {
                return Err(format!(
                    "the runs with the state file {} differ in filename, block size, region, \
                     checksum or content",
                    path.display()
                ));
            }
        }
    }
    Ok(())
}

/// Creates the job from the command line. Limits in sweeps are also taken into account.
fn job(args: &WorkloadArgs, sweeps: &[Sweep]) -> Result<Job, String> {
    let is_swept = |names: &[&str]| sweeps.iter().any(|sweep| names.contains(&sweep.name()));
    let has_bytes = args.total.is_some()
        || args.io_size.is_some()
        || is_swept(&["total", "io_size", "io_limit"]);
    let has_ios = args.number_ios.is_some() || is_swept(&["number_ios"]);
    let is_limited = has_bytes || has_ios;
    let mut job = Job {
        name: COMMAND_LINE.into(),
        splits_region: true,
        total: args.total,
        ramp_time: args.warm_up.unwrap_or(WARM_UP),
        runtime: args.runtime.or((!is_limited).then_some(RUNTIME)),
        time_based: !is_limited,
        fua: args.fua,
        ..Job::default()
    };
    job.content.refill = args.refill_buffers;
    let default = |value: &Option<String>, default: &str| {
        Some(value.clone().unwrap_or_else(|| default.to_owned()))
    };
    let options = [
        ("rw", default(&args.rw, "randread")),
        ("iodepth", default(&args.depth, "32")),
        ("rwmixread", args.mix.clone()),
        ("bs", args.bs.clone()),
        ("bsrange", args.bsrange.clone()),
        ("bssplit", args.bssplit.clone()),
        ("numjobs", args.jobs.clone()),
        ("rate_iops", args.rate_iops.clone()),
        ("rate", args.rate.clone()),
        ("rate_process", args.rate_process.clone()),
        ("random_distribution", args.random_distribution.clone()),
        ("io_size", args.io_size.clone()),
        ("number_ios", args.number_ios.clone()),
        ("offset", args.offset.clone()),
        ("size", args.size.clone()),
        ("fsync", args.fsync.clone()),
        (
            "buffer_compress_percentage",
            args.buffer_compress_percentage.clone(),
        ),
        ("buffer_pattern", args.buffer_pattern.clone()),
        ("verify", args.verify.clone()),
        ("randseed", args.seed.clone()),
    ];
    for (name, value) in options {
        if let Some(value) = value {
            job.set(name, Some(&value), Units::CommandLine)?;
        }
    }
    // If there is no limit on the duration, continue until all operations are complete.
    if has_ios && !has_bytes {
        job.io_size = Some(Amount::Bytes(u64::MAX));
    }
    Ok(job)
}

/// Returns the unit used for sizes in sweeps, which are used in all sections of a job file.
fn base(of_file: Option<KbBase>, args: &BenchArgs) -> Result<KbBase, CliError> {
    match of_file {
        Some(base) => Ok(base),
        None if args.sweep.is_empty() => Ok(KbBase::default()),
        None => {
            let what = "--sweep requires the same kb_base in all sections of the job file";
            Err(CliError::new(Exit::Usage, what))
        }
    }
}

fn read_jobs(path: &Path, args: &BenchArgs) -> Result<JobFile, CliError> {
    if args.workload.is_any() {
        let what = "workload options must be set in the job file, not on the command line";
        return Err(CliError::new(Exit::Usage, what));
    }
    let name = path.display().to_string();
    let text =
        fs::read_to_string(path).map_err(|e| CliError::io(format!("cannot read {name}"), e))?;
    let sources = Sources {
        env: &|name| std::env::var(name).ok(),
        read: &|path| fs::read_to_string(path),
        has_address: args.url.is_some(),
    };
    let file = fio::parse(&name, &text, &sources);
    let file = file.map_err(|e| CliError::new(Exit::Usage, e.to_string()))?;
    note_ineffective(&name, &file, args.url.as_ref());
    Ok(file)
}

/// Reports options without effect. Options that may be important are listed in a single warning,
/// and all options are listed if `-v` is specified.
fn note_ineffective(name: &str, file: &JobFile, url: Option<&Address>) {
    if let Some(url) = url.filter(|_| !file.replaced.is_empty()) {
        tracing::info!("{url} replaces {}", file.replaced.join(", "));
    }
    let is_noted = |option: &str| NOTED.iter().any(|(known, _)| *known == option);
    let options = file.ignored.iter().map(|(_, option)| option.as_str());
    let noted: BTreeSet<&str> = options.filter(|option| is_noted(option)).collect();
    if !noted.is_empty() {
        let noted: Vec<&str> = noted.into_iter().collect();
        tracing::warn!("{name}: options without effect: {}", noted.join(", "));
    }
    for (place, option) in &file.ignored {
        tracing::info!("{place}: option {option} has no effect");
    }
}

impl BenchArgs {
    /// Returns the target of the measurement.
    fn target(&self) -> &BenchTarget {
        self.target.as_ref().expect("required without a verb")
    }
}

impl WorkloadArgs {
    /// Returns whether any option was specified.
    fn is_any(&self) -> bool {
        let given = [
            &self.rw,
            &self.mix,
            &self.bs,
            &self.bsrange,
            &self.bssplit,
            &self.depth,
            &self.jobs,
            &self.rate_iops,
            &self.rate,
            &self.rate_process,
            &self.random_distribution,
            &self.io_size,
            &self.number_ios,
            &self.offset,
            &self.size,
            &self.fsync,
            &self.buffer_compress_percentage,
            &self.buffer_pattern,
            &self.verify,
            &self.seed,
        ];
        let times = self.runtime.is_some() || self.warm_up.is_some() || self.total.is_some();
        given.iter().any(|option| option.is_some()) || times || self.fua || self.refill_buffers
    }
}

/// Returns the address of the device for a job.
fn address(args: &BenchArgs, job: &Job) -> Result<Address, CliError> {
    let usage = |what: String| CliError::new(Exit::Usage, what);
    let address: Result<Address, CliError> = match (args.target(), &job.filename, &args.url) {
        (BenchTarget::Url(url), _, _) => Ok(url.clone()),
        (_, Some(name), _) => name.parse().map_err(|why| {
            usage(format!(
                "filename of job `{}`: {why}; an address on the command line replaces it",
                job.name
            ))
        }),
        (_, None, Some(url)) => Ok(url.clone()),
        (_, None, None) => Err(usage(format!(
            "missing filename of job `{}`, and no address on the command line",
            job.name
        ))),
    };
    let mut address = address?;
    if let Address::File { direct, .. } = &mut address {
        *direct |= job.direct;
    }
    Ok(address)
}

/// Opens each device with the number of connections required by its jobs, after checking whether it
/// can be overwritten.
fn open_all(
    args: &BenchArgs,
    groups: &[Vec<Job>],
    global: &Global,
) -> Result<Vec<(Address, Arc<Disk>)>, CliError> {
    let mut wanted: Vec<(Address, Vec<&Job>)> = Vec::new();
    for job in groups.iter().flatten() {
        let address = address(args, job)?;
        match wanted.iter_mut().find(|(known, _)| *known == address) {
            Some((_, jobs)) => jobs.push(job),
            None => wanted.push((address, vec![job])),
        }
    }
    let is_written = |jobs: &[&Job]| jobs.iter().any(|job| job.is_destructive());
    let written = wanted.iter().filter(|(_, jobs)| is_written(jobs));
    let devices = written.filter_map(|(address, _)| Some((address, device_id(address)?)));
    check_apart(&devices.collect::<Vec<_>>())?;
    let mut disks = Vec::new();
    for (address, jobs) in wanted {
        // If memory was opened multiple times, each would be a separate disk.
        let sessions = match address {
            Address::Memory { .. } => 1,
            _ => jobs.iter().map(|job| job.sessions).max().unwrap_or(1),
        };
        let is_read_only = !is_written(&jobs);
        let mut link = args.link.clone();
        link.buffers = Some(buffers(groups, &jobs, sessions));
        if !is_read_only && device_id(&address).is_some() {
            check_exclusive(&address, sessions)?;
        }
        for number in 0..sessions {
            let disk = open(&address, &link, global.timeout, is_read_only)?;
            if number == 0 && !is_read_only && !args.overwrite {
                guard::check(&disk, &address, global)?;
            }
            disks.push((address.clone(), disk));
        }
    }
    Ok(disks)
}

/// Returns the ID of a block device, or `None` for other addresses.
fn device_id(address: &Address) -> Option<FileId> {
    let Address::File { path, .. } = address else {
        return None;
    };
    let meta = fs::metadata(path).ok()?;
    let is_device = meta.file_type().is_block_device();
    is_device.then(|| FileId::of(&meta))
}

/// Fails if there are multiple addresses for the same device and it is written. It could only be
/// opened once, because this is exclusive.
fn check_apart(devices: &[(&Address, FileId)]) -> Result<(), CliError> {
    for (index, (one, id)) in devices.iter().enumerate() {
        let mut before = devices[..index].iter();
        if let Some((other, _)) = before.find(|(_, other)| other == id) {
            let what = format!("{other} and {one} are the same device");
            return Err(CliError::new(Exit::Usage, what)
                .because(EXCLUSIVE)
                .help("use the same path and the same `direct` in all jobs that write to it"));
        }
    }
    Ok(())
}

/// Fails if there are multiple sessions for an exclusive device, because it can only be opened
/// once.
fn check_exclusive(address: &Address, sessions: u32) -> Result<(), CliError> {
    if sessions == 1 {
        return Ok(());
    }
    let what = format!("cannot open {sessions} sessions for {address}");
    Err(CliError::new(Exit::Usage, what)
        .because(EXCLUSIVE)
        .help("omit --sessions to use a single session for all jobs"))
}

/// Returns the buffer size required for each session of a disk in bytes. Jobs in a group run
/// concurrently.
fn buffers(groups: &[Vec<Job>], jobs: &[&Job], sessions: u32) -> u64 {
    let of_group = |group: &Vec<Job>| {
        let mine = group
            .iter()
            .filter(|job| jobs.iter().any(|mine| std::ptr::eq(*mine, *job)));
        let bytes = mine.map(|job| riser_bench::buffer_bytes(job, job.sessions.min(sessions)));
        bytes.fold(0, u64::saturating_add)
    };
    let need = groups.iter().map(of_group).max().unwrap_or(0);
    // Reserve additional memory for internal commands of the session and for protection
    // information.
    need.saturating_add(17 << 20).clamp(BUFFERS, MAX_BUFFERS)
}

fn title(group: &[Task<Disk>], number: usize, count: usize) -> String {
    let name = match group {
        [task] => task.job.name.as_str(),
        _ => "several jobs",
    };
    match count {
        1 => name.to_owned(),
        _ => format!("{name} ({} of {count})", number + 1),
    }
}

fn live(title: &str, p: &Progress) -> String {
    if p.is_ramp {
        return format!("{title}: warming up");
    }
    if p.is_read_back {
        return format!("{title}: {:>3.0} % read back", 100.0 * p.done);
    }
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    format!(
        "{title}: {:>3.0} %  {:>9.0} IOPS  {}/s  p50 {:.0} us  p99 {:.0} us",
        100.0 * p.done,
        p.iops,
        units::show_size(p.bytes_per_second as u64),
        micros(p.p50),
        micros(p.p99)
    )
}

/// Prints results and writes all output files. If a file can't be written, the remaining files are
/// still written.
///
/// # Errors
/// Returns the first error.
fn emit(
    outcomes: &[Outcome],
    files: ResultFiles,
    bins: bool,
    global: &Global,
) -> Result<(), CliError> {
    let machine = Machine::this();
    let printed = output::print(|out| match global.output {
        Format::Json => json::write(out, outcomes, &machine, bins),
        Format::Text => text::write(out, outcomes),
    });
    let save = |file: Option<ResultFile>, write: &dyn Fn(&mut dyn Write) -> io::Result<()>| {
        file.map_or(Ok(()), |file| file.save(write))
    };
    let saved = [
        save(files.csv, &|out| csv::write(out, outcomes)),
        save(files.hdr_log, &|out| hdr::write(out, outcomes)),
        save(files.report, &|out| html::write(out, outcomes, &machine)),
    ];
    saved.into_iter().fold(printed, Result::and)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use riser_bench::job::{Access, Pattern};

    use super::super::args::{Args, Verb};
    use super::*;

    fn parsed(words: &[&str]) -> Result<Vec<Vec<Job>>, CliError> {
        let words = ["riser", "bench"].iter().chain(words);
        let Verb::Bench(args) = Args::try_parse_from(words).unwrap().verb else {
            panic!("it is `bench`");
        };
        groups(&args)
    }

    fn one(words: &[&str]) -> Job {
        parsed(words).unwrap().remove(0).remove(0)
    }

    #[test]
    fn command_line_job_has_separate_defaults() {
        let job = one(&["mem:8M"]);
        assert_eq!((job.access, job.pattern), (Access::Read, Pattern::Random));
        assert_eq!((job.iodepth, job.numjobs, job.rwmixread), (32, 1, 50));
        assert_eq!((job.max_block(), job.randseed), (4096, 1));
        assert_eq!((job.runtime, job.ramp_time), (Some(RUNTIME), WARM_UP));
        assert!(job.time_based && job.splits_region && job.verify.is_none());
        let job = one(&["mem:8M", "--total", "1M", "--warm-up", "0"]);
        assert_eq!((job.runtime, job.total), (None, Some(1 << 20)));
        assert!(!job.time_based && job.ramp_time.is_zero());
        let job = one(&["mem:8M", "--io-size", "1M", "--runtime", "5"]);
        assert_eq!(job.io_size, Some(Amount::Bytes(1 << 20)));
        assert_eq!(job.runtime, Some(Duration::from_secs(5)));
        assert!(!job.time_based, "whichever comes first");
        // A state file requires headers.
        let job = one(&["mem:8M", "--rw", "write", "--state", "f"]);
        assert!(job.verify.is_some() && job.state.is_some());
    }

    #[test]
    fn fio_option_names_are_accepted() {
        let ours = one(&[
            "mem:8M",
            "--depth",
            "8",
            "--jobs=2",
            "--mix=70",
            "--warm-up=2",
        ]);
        let fio = one(&[
            "mem:8M",
            "--iodepth=8",
            "--numjobs=2",
            "--rwmixread=70",
            "--ramp_time=2",
        ]);
        assert_eq!(ours, fio);
    }

    #[test]
    fn sweep_runs_all_combinations() {
        let runs = parsed(&["mem:8M", "--rounds=2", "--sweep", "bs=4k,8k", "depth=1..4"]).unwrap();
        let runs: Vec<_> = runs
            .iter()
            .map(|g| (g[0].max_block(), g[0].iodepth))
            .collect();
        let round = [
            (4096, 1),
            (4096, 2),
            (4096, 4),
            (8192, 1),
            (8192, 2),
            (8192, 4),
        ];
        assert_eq!(runs, [round, round].concat());
        let refused = |sweep| {
            parsed(&["mem:8M", "--sweep", sweep])
                .unwrap_err()
                .to_string()
        };
        for sweep in ["colour=red", "sessions=0", "sessions=65"] {
            assert!(refused(sweep).contains(&format!("--sweep {sweep}")));
        }
        let ignored = refused("ioengine=libaio,sync");
        assert!(ignored.contains("has no effect"), "{ignored}");
        for sweep in ["filename=mem:1M,mem:2M", "name=a,b", "stonewall=0,1"] {
            let name = sweep.split('=').next().unwrap();
            let error = refused(sweep);
            assert!(error.contains(&format!("cannot sweep {name}")), "{error}");
        }
        let error = parsed(&["mem:8M", "--sweep", "randseed=1..1000000", "--rounds=1000"]);
        assert!(error.unwrap_err().to_string().contains("more than"));
    }

    #[test]
    fn sweep_sizes_use_job_file_base() {
        let path = std::env::temp_dir().join(format!("riser-base-{}.fio", std::process::id()));
        let name = path.to_str().unwrap();
        let swept = |text: &str| {
            fs::write(&path, text).unwrap();
            parsed(&[name, "mem:8M", "--sweep", "io_size=8k,4k..8k"])
        };
        let sizes = swept("[global]\nkb_base=1000\n[a]\nbs=512\n").unwrap();
        let sizes: Vec<_> = sizes.iter().map(|group| group[0].io_size).collect();
        assert_eq!(sizes, [8000, 4000, 8000].map(|n| Some(Amount::Bytes(n))));
        let error = swept("[a]\n[b]\nkb_base=1000\n").unwrap_err();
        assert!(error.what.contains("kb_base"), "{error}");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn memory_disk_rejects_state_file() {
        let words = ["riser", "bench", "mem:8M", "--rw=write", "--state=f"];
        let Verb::Bench(args) = Args::try_parse_from(words).unwrap().verb else {
            panic!("it is `bench`");
        };
        let error = check_state(&args, &groups(&args).unwrap()).unwrap_err();
        assert_eq!(error.exit, Exit::Usage);
        assert!(
            error.what.contains("--state is not supported for mem:"),
            "{error}"
        );
    }

    #[test]
    fn written_device_allows_single_session() {
        let address: Address = "/dev/sdx".parse().unwrap();
        assert!(check_exclusive(&address, 1).is_ok());
        let error = check_exclusive(&address, 2).unwrap_err();
        assert_eq!(error.exit, Exit::Usage);
        assert!(
            error
                .what
                .contains("cannot open 2 sessions for file:/dev/sdx"),
            "{error}"
        );
        assert!(error.help.unwrap().contains("--sessions"));
        // Regular files can be opened multiple times, and memory is not a device.
        for address in ["/proc/version", "/does/not/exist", "mem:1M"] {
            let id = device_id(&address.parse().unwrap());
            assert_eq!(id, None, "{address}");
        }
    }

    #[test]
    fn written_device_allows_single_address() {
        let addresses = ["/dev/sdx", "file:/dev/sdx?direct=on", "/dev/sdy"];
        let [cached, direct, other]: [Address; 3] = addresses.map(|text| text.parse().unwrap());
        let (x, y) = (FileId::Device(1), FileId::Device(2));
        assert!(check_apart(&[(&cached, x), (&other, y)]).is_ok());
        let error = check_apart(&[(&cached, x), (&other, y), (&direct, x)]).unwrap_err();
        assert_eq!(error.exit, Exit::Usage);
        assert!(error.what.contains("are the same device"), "{error}");
        assert!(error.help.unwrap().contains("`direct`"));
    }

    #[test]
    fn session_has_buffers_for_all_jobs() {
        let words = "mem:256M --sessions=4 --jobs=4 --depth=128 --bs=512k";
        let groups = parsed(&words.split(' ').collect::<Vec<_>>()).unwrap();
        let jobs: Vec<_> = groups.iter().flatten().collect();
        assert!(buffers(&groups, &jobs, 1) >= 256 << 20);
        assert!(buffers(&groups, &jobs, 4) < 128 << 20);
    }

    #[test]
    fn verify_only_skips_other_jobs() {
        let path = std::env::temp_dir().join(format!("riser-only-{}.fio", std::process::id()));
        let name = path.to_str().unwrap();
        let text = "[a]\nrw=randread\n[b]\nstonewall\nrw=randwrite\nverify=crc32c\n";
        fs::write(&path, text).unwrap();
        let words = [name, "mem:8M", "--state=f"];
        assert_eq!(parsed(&words).unwrap().len(), 2);
        let groups = parsed(&[&words[..], &["--verify-only"]].concat()).unwrap();
        fs::remove_file(&path).unwrap();
        let jobs: Vec<_> = groups.iter().flatten().collect();
        assert_eq!((groups.len(), jobs.len()), (1, 1));
        assert!(jobs[0].name == "b" && jobs[0].verify_only);
    }

    #[test]
    fn incompatible_state_file_runs_are_rejected() {
        let swept = |sweep| {
            let words = ["mem:8M", "--rw=write", "--state=f", "--rounds=2"];
            parsed(&[&words[..], &["--sweep", sweep]].concat())
        };
        for sweep in [
            "bs=4k,8k",
            "size=1M,2M",
            "offset=1M,2M",
            "verify=crc32c,crc64",
            "buffer_compress_percentage=10,50",
        ] {
            let error = swept(sweep).unwrap_err();
            assert_eq!(error.exit, Exit::Usage);
            assert!(error.what.contains("state file f differ"), "{error}");
        }
        for sweep in ["iodepth=1,2", "numjobs=1,2", "refill_buffers=0,1"] {
            assert_eq!(swept(sweep).unwrap().len(), 4, "{sweep}");
        }
    }

    #[test]
    fn state_file_rejects_multiple_disks() {
        let path = std::env::temp_dir().join(format!("riser-disks-{}.fio", std::process::id()));
        let name = path.to_str().unwrap();
        fs::write(&path, "[a]\nrw=randwrite\nverify=crc32c\n").unwrap();
        let swept = |sweep| parsed(&[name, "--state=f", "--rounds=2", "--sweep", sweep]);
        let error = swept("filename=/dev/sdb,/dev/sdc").unwrap_err();
        let same = swept("filename=/dev/sdb").unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(error.exit, Exit::Usage);
        assert!(error.what.contains("differ in filename"), "{error}");
        assert_eq!(same.len(), 2);
    }

    #[test]
    fn swept_limit_replaces_default_runtime() {
        for (sweep, ios) in [("io_size=1M,2M", None), ("number_ios=5,9", Some(5))] {
            let job = one(&["mem:8M", "--sweep", sweep]);
            assert!(!job.time_based && job.runtime.is_none(), "{sweep}");
            assert_eq!(job.number_ios, ios);
            assert!(job.io_size.is_some());
        }
        let job = one(&["mem:8M", "--sweep", "total=1M,2M", "--runtime", "5"]);
        assert_eq!((job.total, job.time_based), (Some(1 << 20), false));
        assert_eq!(job.runtime, Some(Duration::from_secs(5)));
    }

    #[test]
    fn direct_job_opens_file_directly() {
        let words = ["riser", "bench", "jobs.fio", "/tmp/disk"];
        let Verb::Bench(args) = Args::try_parse_from(words).unwrap().verb else {
            panic!("it is `bench`");
        };
        for direct in [false, true] {
            let job = Job {
                direct,
                ..Job::default()
            };
            let expected = Address::File {
                path: "/tmp/disk".into(),
                direct,
            };
            assert_eq!(address(&args, &job).unwrap(), expected);
            let disk = identity::of(&expected, None);
            let same = "file:/tmp/disk".parse().unwrap();
            assert_eq!(disk, identity::of(&same, None));
        }
    }

    #[test]
    fn job_file_excludes_workload_options() {
        let error = parsed(&["jobs.fio", "mem:8M", "--bs", "8k"]).unwrap_err();
        assert!(error.to_string().contains("in the job file"), "{error}");
        let error = parsed(&["mem:8M", "mem:16M"]).unwrap_err();
        assert!(error.to_string().contains("two addresses"), "{error}");
    }
}
