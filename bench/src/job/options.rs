//! Parses and formats fio's options.

use super::tables::{LIMITED, UNSUPPORTED, has_no_effect};
use super::values::{
    Units, boolean, by_direction, distribution, number, pattern, percentage, range, split,
};
use super::{Access, Amount, BlockSizes, Checksum, Distribution, Job, Pattern, Rate, RateProcess};

/// Maximum number of connections for a job.
const MAX_SESSIONS: u32 = 64;

pub(super) fn set(
    job: &mut Job,
    name: &str,
    value: Option<&str>,
    units: Units,
) -> Result<bool, String> {
    let value = value.map(str::trim).filter(|value| !value.is_empty());
    if has_no_effect(name) {
        return Ok(false);
    }
    if let Some((_, is_accepted, why)) = LIMITED.iter().find(|(known, ..)| *known == name) {
        // If only the name is specified, the option is enabled.
        let value = value.unwrap_or("1");
        return match is_accepted(value) {
            true => Ok(false),
            false => Err(format!("`{name}={value}` is not supported: {why}")),
        };
    }
    if set_flag(job, name, value)? {
        return Ok(true);
    }
    if let Some((_, why)) = UNSUPPORTED.iter().find(|(known, _)| *known == name) {
        return Err(format!("option `{name}` is not supported: {why}"));
    }
    let text =
        value.ok_or_else(|| format!("missing value of option `{name}`, or unknown option"))?;
    let is_set = set_workload(job, name, text, units)?
        || set_extent(job, name, text, units)?
        || set_data(job, name, text)?;
    match is_set {
        true => Ok(true),
        false => Err(format!("unknown option `{name}`")),
    }
}

/// Boolean options, which can be specified without a value.
fn set_flag(job: &mut Job, name: &str, value: Option<&str>) -> Result<bool, String> {
    let flag = match name {
        "time_based" => &mut job.time_based,
        "refill_buffers" => &mut job.content.refill,
        "end_fsync" | "fsync_on_close" => &mut job.end_fsync,
        "stonewall" | "wait_for_previous" => &mut job.stonewall,
        "verify_only" => &mut job.verify_only,
        "do_verify" => &mut job.do_verify,
        "fua" | "writefua" => &mut job.fua,
        "direct" => &mut job.direct,
        "randrepeat" | "allrandrepeat" => {
            job.randrepeat = boolean(value)?;
            // As in fio, an explicit seed takes precedence.
            if !job.randrepeat && job.randseed == Job::default().randseed {
                job.randseed = fastrand::u64(..);
            }
            return Ok(true);
        }
        "buffered" => {
            job.direct = !boolean(value)?;
            return Ok(true);
        }
        "zero_buffers" => {
            if boolean(value)? {
                job.content.pattern = vec![0];
            }
            return Ok(true);
        }
        _ => return Ok(false),
    };
    *flag = boolean(value)?;
    Ok(true)
}

/// Sets options for the operations and for their concurrency.
fn set_workload(job: &mut Job, name: &str, text: &str, units: Units) -> Result<bool, String> {
    match name {
        "rw" | "readwrite" => set_rw(job, text, units)?,
        "rwmixread" => job.rwmixread = percentage(text)?,
        "rwmixwrite" => job.rwmixread = 100 - percentage(text)?,
        "bs" | "blocksize" => by_direction(text, &mut job.sizes, |text| {
            units.block(text).map(BlockSizes::Fixed)
        })?,
        "bsrange" | "blocksize_range" => {
            by_direction(text, &mut job.sizes, |text| range(text, units))?;
        }
        "bssplit" => by_direction(text, &mut job.sizes, |text| split(text, units))?,
        "iodepth" => job.iodepth = number(text)?,
        "numjobs" => job.numjobs = number(text)?,
        "sessions" => {
            job.sessions = match number(text)? {
                count @ 1..=MAX_SESSIONS => count,
                _ => return Err(format!("`{text}` is not a number from 1 to {MAX_SESSIONS}")),
            };
        }
        "rate_iops" => by_direction(text, &mut job.rates, |text| {
            positive(units.size(text)?).map(|n| Some(Rate::Iops(n)))
        })?,
        "rate" => by_direction(text, &mut job.rates, |text| {
            positive(units.size(text)?).map(|n| Some(Rate::Bytes(n)))
        })?,
        "rate_process" => {
            job.rate_process = match text {
                "linear" => RateProcess::Linear,
                "poisson" => RateProcess::Poisson,
                _ => {
                    return Err(format!(
                        "invalid process `{text}`: expected linear or poisson"
                    ));
                }
            };
        }
        "thinktime" => job.thinktime = units.micros(text)?,
        "thinktime_blocks" => job.thinktime_blocks = positive(number(text)?)?,
        "random_distribution" => job.distribution = distribution(text)?,
        "fsync" | "fdatasync" => job.fsync = number(text)?,
        "sync" => {
            job.fua = match text {
                "none" | "0" => false,
                "sync" | "dsync" | "1" => true,
                _ => {
                    return Err(format!(
                        "invalid value `{text}`: expected none, sync or dsync"
                    ));
                }
            };
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Sets options for the region and for the amount transferred.
fn set_extent(job: &mut Job, name: &str, text: &str, units: Units) -> Result<bool, String> {
    match name {
        "offset" => job.offset = units.amount(text)?,
        "offset_increment" => job.offset_increment = units.amount(text)?,
        "size" => job.size = Some(units.amount(text)?),
        "io_size" | "io_limit" => job.io_size = Some(units.amount(text)?),
        "total" => job.total = Some(positive(units.size(text)?)?),
        "number_ios" => job.number_ios = Some(positive(number(text)?)?),
        "loops" => job.loops = positive(number(text)?)?,
        "startdelay" => job.startdelay = units.time(text)?,
        "ramp_time" => job.ramp_time = units.time(text)?,
        "runtime" | "timeout" => {
            job.runtime = Some(units.time(text)?).filter(|time| !time.is_zero());
        }
        "zonemode" if text == "none" => {}
        "zonemode" => return Err(format!("unsupported zone mode `{text}`: expected none")),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Sets options for contents, verification and names.
fn set_data(job: &mut Job, name: &str, text: &str) -> Result<bool, String> {
    match name {
        "name" => job.name = text.to_owned(),
        "filename" => job.filename = Some(filename(text)?),
        "randseed" => job.randseed = number(text)?,
        "buffer_pattern" => job.content.pattern = pattern(text)?,
        "buffer_compress_percentage" => {
            let percent = percentage(text)?;
            job.content.compress_percentage = Some(percent);
            // As in fio. Otherwise all blocks would be identical and could be compressed together.
            job.content.refill |= percent != 100;
        }
        "verify" => {
            job.verify = match text {
                "0" | "none" => None,
                "crc32c" | "crc32c-intel" => Some(Checksum::Crc32c),
                "crc32" => Some(Checksum::Crc32),
                "crc64" => Some(Checksum::Crc64),
                _ => {
                    return Err(format!(
                        "unsupported checksum `{text}`: expected crc32c, crc32 or crc64"
                    ));
                }
            };
        }
        "state" => job.state = Some(text.into()),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Parses an address. fio separates multiple paths by colons, and a colon in a name must be
/// escaped.
fn filename(text: &str) -> Result<String, String> {
    let is_path = |text: &str| {
        ["/", "./", "../"]
            .iter()
            .any(|start| text.starts_with(start))
    };
    if !is_path(text) {
        return Ok(text.to_owned());
    }
    // As paths can't contain NUL, we can use it to represent an escaped colon.
    let unescaped = text.replace("\\:", "\0");
    match unescaped.split(':').skip(1).any(is_path) {
        true => Err(format!(
            "`filename={text}` is not supported: a job runs on one device (write \\: for a colon of \
             its name)"
        )),
        false => Ok(unescaped.replace('\0', ":")),
    }
}

fn positive(number: u64) -> Result<u64, String> {
    match number {
        0 => Err("invalid value 0".into()),
        number => Ok(number),
    }
}

/// Parses `randread` or `write:64k`.
fn set_rw(job: &mut Job, text: &str, units: Units) -> Result<(), String> {
    let (name, modifier) = match text.split_once(':') {
        Some((name, modifier)) => (name, Some(modifier)),
        None => (text, None),
    };
    let (pattern, kind) = match name.strip_prefix("rand") {
        Some(kind) => (Pattern::Random, kind),
        None => (Pattern::Sequential, name),
    };
    job.access = match kind {
        "read" => Access::Read,
        "write" => Access::Write,
        "rw" => Access::Mixed,
        "readwrite" if pattern == Pattern::Sequential => Access::Mixed,
        "trim" => Access::Trim,
        "trimwrite" => Access::TrimWrite,
        "flush" if pattern == Pattern::Sequential => Access::Flush,
        _ => {
            return Err(format!(
                "invalid access pattern `{name}`: expected read, write, rw, trim, trimwrite, \
                 randread, randwrite, randrw, randtrim, randtrimwrite or flush"
            ));
        }
    };
    job.pattern = pattern;
    job.modifier = match (modifier, pattern) {
        (None, _) => 0,
        (Some(skip), Pattern::Sequential) => units.size(skip)?,
        (Some(count), Pattern::Random) => positive(number(count)?)?,
    };
    Ok(())
}

/// Formats a size for fio.
fn size(bytes: u64) -> String {
    let units = [(40, "t"), (30, "g"), (20, "m"), (10, "k")];
    let whole = |(shift, _): &&(u32, &str)| bytes != 0 && bytes.is_multiple_of(1 << *shift);
    match units.iter().find(whole) {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

fn amount(amount: Amount) -> String {
    match amount {
        Amount::Bytes(bytes) => size(bytes),
        Amount::Percent(percent) => format!("{percent}%"),
    }
}

fn rw(job: &Job) -> String {
    let name = match job.access {
        Access::Read => "read",
        Access::Write => "write",
        Access::Mixed => "rw",
        Access::Trim => "trim",
        Access::TrimWrite => "trimwrite",
        Access::Flush => "flush",
    };
    match (job.pattern, job.modifier) {
        (Pattern::Sequential, 0) => name.into(),
        (Pattern::Sequential, skip) => format!("{name}:{}", size(skip)),
        (Pattern::Random, 0) => format!("rand{name}"),
        (Pattern::Random, count) => format!("rand{name}:{count}"),
    }
}

/// Returns the option for block sizes and its value. If the directions have different types of
/// sizes, all are converted to splits.
fn block_sizes(sizes: &[BlockSizes; 3]) -> (&'static str, String) {
    let is_fixed = |s: &BlockSizes| matches!(s, BlockSizes::Fixed(_));
    let is_range = |s: &BlockSizes| matches!(s, BlockSizes::Range { .. });
    let name = if sizes.iter().all(is_fixed) {
        "bs"
    } else if sizes.iter().all(is_range) {
        "bsrange"
    } else {
        "bssplit"
    };
    let show = |sizes: &BlockSizes| match sizes {
        BlockSizes::Fixed(bytes) if name == "bssplit" => format!("{}/100", size((*bytes).into())),
        BlockSizes::Fixed(bytes) => size((*bytes).into()),
        BlockSizes::Range { min, max } => {
            format!("{}-{}", size((*min).into()), size((*max).into()))
        }
        BlockSizes::Split(parts) => {
            let part =
                |(bytes, percent): &(u32, f64)| format!("{}/{percent}", size((*bytes).into()));
            parts.iter().map(part).collect::<Vec<_>>().join(":")
        }
    };
    let all: Vec<String> = sizes.iter().map(show).collect();
    match all.iter().all(|one| *one == all[0]) {
        true => (name, all[0].clone()),
        false => (name, all.join(",")),
    }
}

/// Returns the rates for which `of` returns a number, by direction.
fn rates(job: &Job, of: fn(Rate) -> Option<u64>) -> Option<String> {
    let text = |n: u64| n.to_string();
    let show = |rate: &Option<Rate>| rate.and_then(of).map_or_else(String::new, text);
    let all: Vec<String> = job.rates.iter().map(show).collect();
    match all.iter().all(|one| *one == all[0]) {
        true => Some(all[0].clone()).filter(|one| !one.is_empty()),
        false => Some(all.join(",")),
    }
}

fn iops(rate: Rate) -> Option<u64> {
    match rate {
        Rate::Iops(n) => Some(n),
        Rate::Bytes(_) => None,
    }
}

fn bandwidth(rate: Rate) -> Option<u64> {
    match rate {
        Rate::Iops(_) => None,
        Rate::Bytes(n) => Some(n),
    }
}

fn zones(distribution: &Distribution) -> Option<String> {
    match distribution {
        Distribution::Uniform => None,
        Distribution::Zipf(theta) => Some(format!("zipf:{theta}")),
        Distribution::Zoned(zones) => {
            let zones = zones.iter().map(|(a, b)| format!("{a}/{b}"));
            Some(format!("zoned:{}", zones.collect::<Vec<_>>().join(":")))
        }
    }
}

/// Formats a pattern if it isn't empty.
fn hex(pattern: &[u8]) -> Option<String> {
    let digits: String = pattern.iter().map(|byte| format!("{byte:02x}")).collect();
    (!digits.is_empty()).then(|| format!("0x{digits}"))
}

pub(super) fn describe(job: &Job) -> Vec<(String, String)> {
    let (name, sizes) = block_sizes(&job.sizes);
    let seconds = |time: std::time::Duration| match time.subsec_micros() {
        0 => time.as_secs().to_string(),
        _ => format!("{}us", time.as_micros()),
    };
    let yes = |flag: bool| flag.then(|| "1".to_owned());
    let checksum = |checksum| match checksum {
        Checksum::Crc32c => "crc32c".to_owned(),
        Checksum::Crc32 => "crc32".to_owned(),
        Checksum::Crc64 => "crc64".to_owned(),
    };
    let poisson = job.is_open_loop() && job.rate_process == RateProcess::Poisson;
    let has_rates = job.rates.iter().any(Option::is_some);
    let thinks = !job.thinktime.is_zero();
    // Remove this if unlimited, which is used if operations are counted instead.
    let io_size = job.io_size.filter(|size| *size != Amount::Bytes(u64::MAX));
    let options = [
        ("direct", yes(job.direct)),
        ("rw", Some(rw(job))),
        (
            "rwmixread",
            (job.access == Access::Mixed && !has_rates).then(|| job.rwmixread.to_string()),
        ),
        (name, Some(sizes)),
        ("iodepth", Some(job.iodepth.to_string())),
        ("numjobs", Some(job.numjobs.to_string())),
        (
            "sessions",
            (job.sessions > 1).then(|| job.sessions.to_string()),
        ),
        ("rate_iops", rates(job, iops)),
        ("rate", rates(job, bandwidth)),
        ("rate_process", poisson.then(|| "poisson".into())),
        ("random_distribution", zones(&job.distribution)),
        (
            "offset",
            Some(amount(job.offset)).filter(|offset| offset != "0"),
        ),
        (
            "offset_increment",
            Some(amount(job.offset_increment)).filter(|offset| offset != "0"),
        ),
        ("size", job.size.map(amount)),
        ("io_size", io_size.map(amount)),
        ("total", job.total.map(size)),
        ("number_ios", job.number_ios.map(|n| n.to_string())),
        ("loops", (job.loops > 1).then(|| job.loops.to_string())),
        (
            "startdelay",
            Some(job.startdelay).filter(|t| !t.is_zero()).map(seconds),
        ),
        (
            "thinktime",
            thinks.then(|| format!("{}us", job.thinktime.as_micros())),
        ),
        (
            "thinktime_blocks",
            (thinks && job.thinktime_blocks > 1).then(|| job.thinktime_blocks.to_string()),
        ),
        (
            "ramp_time",
            Some(job.ramp_time).filter(|t| !t.is_zero()).map(seconds),
        ),
        ("runtime", job.runtime.map(seconds)),
        ("time_based", yes(job.time_based)),
        ("fsync", (job.fsync > 0).then(|| job.fsync.to_string())),
        ("end_fsync", yes(job.end_fsync)),
        ("fua", yes(job.fua)),
        ("refill_buffers", yes(job.content.refill)),
        (
            "buffer_compress_percentage",
            job.content.compress_percentage.map(|p| p.to_string()),
        ),
        ("buffer_pattern", hex(&job.content.pattern)),
        ("verify", job.verify.map(checksum)),
        ("do_verify", (!job.do_verify).then(|| "0".to_owned())),
        ("verify_only", yes(job.verify_only)),
        ("randrepeat", (!job.randrepeat).then(|| "0".to_owned())),
        ("randseed", Some(job.randseed.to_string())),
    ];
    let named = |(name, value): (&str, Option<String>)| Some((name.to_owned(), value?));
    options.into_iter().filter_map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::super::KbBase;
    use super::super::tables::{IGNORED, NOTED};
    use super::*;

    const FIO: Units = Units::Fio(KbBase::Binary);

    fn job(options: &[(&str, &str)]) -> Job {
        let mut job = Job::default();
        for (name, value) in options {
            job.set(name, Some(value), FIO).unwrap();
        }
        job
    }

    #[test]
    fn described_options_recreate_job() {
        for options in [
            &[("rw", "randrw"), ("rwmixread", "70"), ("bs", "8k,64k")] as &[_],
            &[
                ("rw", "read:64k"),
                ("bsrange", "4k-64k"),
                ("size", "50%"),
                ("runtime", "1500ms"),
            ],
            &[
                ("bssplit", "4k/60:64k/40"),
                ("random_distribution", "zipf:1.2"),
                ("fsync", "8"),
            ],
            &[
                ("rate_iops", "1000"),
                ("rate_process", "poisson"),
                ("verify", "crc32c"),
            ],
            &[
                ("rw", "randtrim:4"),
                ("rate", "1m,2m,"),
                ("time_based", "1"),
                ("fua", "1"),
            ],
            &[("rw", "randrw"), ("rate_iops", "1000,"), ("rate", ",1m")],
            &[
                ("random_distribution", "hotspot:20/80"),
                ("buffer_compress_percentage", "40"),
                ("buffer_pattern", "\"text\""),
            ],
            &[
                ("randrepeat", "0"),
                ("randseed", "9"),
                ("offset_increment", "10%"),
                ("total", "3m"),
                ("do_verify", "0"),
                ("direct", "1"),
                ("sessions", "64"),
            ],
            &[
                ("loops", "3"),
                ("startdelay", "5"),
                ("thinktime", "300"),
                ("thinktime_blocks", "8"),
            ],
        ] {
            let first = job(options);
            let described = first.options();
            let texts: Vec<_> = described
                .iter()
                .map(|(n, v)| (n.as_str(), v.as_str()))
                .collect();
            assert_eq!(job(&texts), first, "{texts:?}");
        }
    }

    #[test]
    fn option_errors_include_name_and_reason() {
        let refused =
            |name: &str, value: Option<&str>| Job::default().set(name, value, FIO).unwrap_err();
        assert!(
            refused("rate_min", Some("5")).contains("`rate_min` is not supported: a missed rate")
        );
        assert!(refused("loops", Some("0")).contains("invalid value 0"));
        assert!(refused("startdelay", Some("5-10")).contains("is not a time"));
        assert!(refused("blokksize", Some("4k")).contains("unknown option `blokksize`"));
        assert!(refused("bs", None).contains("missing value of option `bs`"));
        assert!(refused("rw", Some("sideways")).contains("invalid access pattern `sideways`"));
        assert!(refused("rw", Some("randread:0")).contains('0'));
        assert!(refused("rate_iops", Some("0")).contains("invalid value 0"));
        assert!(refused("sessions", Some("0")).contains("from 1 to 64"));
        assert!(refused("sessions", Some("65")).contains("from 1 to 64"));
        assert!(refused("verify", Some("md5")).contains("crc32c"));
        assert!(refused("time_based", Some("maybe")).contains("expected 0 or 1"));
        assert!(!Job::default().set("ioengine", Some("libaio"), FIO).unwrap());
    }

    #[test]
    fn limited_options_reject_other_values() {
        let set = |name, value| Job::default().set(name, value, FIO);
        for (name, refused, accepted) in [
            ("percentile_list", "99:99.999", "50:99:99.9"),
            ("lat_percentiles", "1", "0"),
            ("clat_percentiles", "0", "1"),
            ("unified_rw_reporting", "mixed", "none"),
            ("unified_rw_reporting", "1", "0"),
            ("verify_fatal", "0", "1"),
            ("norandommap", "0", "1"),
            ("iodepth_batch", "8", "1"),
            ("iodepth_batch_submit", "0", "1"),
            ("iodepth_batch_complete", "4", "0"),
            ("iodepth_batch_complete_min", "4", "1"),
            ("io_submit_mode", "offload", "inline"),
            ("unlink", "1", "0"),
        ] {
            let error = set(name, Some(refused)).unwrap_err();
            assert!(error.contains("not supported"), "{error}");
            assert!(error.contains(&format!("{name}={refused}")), "{error}");
            assert_eq!(set(name, Some(accepted)), Ok(false), "{name}={accepted}");
        }
        assert_eq!(set("verify_fatal", None), Ok(false));
        assert!(set("lat_percentiles", None).is_err());
        for name in ["latency_target", "directory", "steadystate", "exitall"] {
            let error = set(name, Some("5")).unwrap_err();
            assert!(error.contains("is not supported: "), "{error}");
        }
        for name in ["cpus_allowed", "nice", "write_lat_log", "log_hist_msec"] {
            assert_eq!(set(name, Some("5")), Ok(false), "{name}");
        }
    }

    #[test]
    fn randrepeat_off_draws_unless_seeded() {
        let [one, other] = [(); 2].map(|()| job(&[("randrepeat", "0")]).randseed);
        assert_ne!(one, other);
        assert_eq!(job(&[("randrepeat", "0"), ("randseed", "7")]).randseed, 7);
        assert_eq!(job(&[("randseed", "7"), ("randrepeat", "0")]).randseed, 7);
        assert_eq!(job(&[("randrepeat", "1")]), Job::default());
    }

    #[test]
    fn multiple_filenames_fail() {
        let set = |text| {
            let mut job = Job::default();
            job.set("filename", Some(text), FIO)?;
            Ok::<_, String>(job.filename.unwrap())
        };
        for text in ["/dev/a:/dev/b", "/dev/a:./b", "./a:../b"] {
            let error = set(text).unwrap_err();
            assert!(error.contains("not supported"), "{error}");
        }
        let id = "/dev/disk/by-path/pci-0000\\:00\\:1f.2";
        assert_eq!(set(id).unwrap(), "/dev/disk/by-path/pci-0000:00:1f.2");
        for text in ["/dev/pci-0000:00", "srp://h:5000/0", "file:/a", "/a\\:/b"] {
            assert_eq!(set(text).unwrap(), text.replace('\\', ""));
        }
    }

    #[test]
    fn option_tables_are_disjoint() {
        let limited = LIMITED.iter().map(|(name, ..)| name);
        let others = IGNORED.iter().chain(NOTED).chain(UNSUPPORTED);
        let others = others.map(|(name, _)| name);
        let mut names: Vec<_> = others.chain(limited).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
