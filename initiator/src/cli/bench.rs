//! `riser bench`.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use super::args::{BenchArgs, Global, Rw};
use super::disk::open;
use super::exit::{CliError, Exit};
use super::{guard, output, units};
use crate::bench::{self, BenchConfig, Direction, Mix, Pattern, Report, Until};
use crate::block::BlockDevice;

/// Default duration of a measurement.
const RUNTIME: Duration = Duration::from_secs(10);

#[derive(Serialize)]
struct Document<'a> {
    url: String,
    #[serde(flatten)]
    report: &'a Report,
}

pub(super) fn run(args: &BenchArgs, global: &Global) -> Result<(), CliError> {
    let mix = match args.rw {
        Rw::Read | Rw::Randread => Mix::READ,
        Rw::Write | Rw::Randwrite => Mix::WRITE,
        Rw::Rw | Rw::Randrw => {
            Mix::new(args.mix).ok_or_else(|| CliError::new(Exit::Usage, "--mix is a percentage"))?
        }
    };
    let disk = open(&args.url, &args.link, global.timeout, mix == Mix::READ)?;
    // Every mix but pure reads destroys what is on the disk.
    if mix != Mix::READ && !args.overwrite {
        guard::check(&disk, &args.url, global)?;
    }
    let capacity = disk.geometry().capacity;
    let end = match args.size {
        Some(size) => args.offset.saturating_add(size),
        None => capacity,
    };
    let config = BenchConfig {
        pattern: match args.rw {
            Rw::Read | Rw::Write | Rw::Rw => Pattern::Sequential,
            Rw::Randread | Rw::Randwrite | Rw::Randrw => Pattern::Random,
        },
        mix,
        block_size: u32::try_from(args.bs).unwrap_or(u32::MAX),
        depth: args.depth,
        jobs: args.jobs,
        until: match args.total {
            Some(bytes) => Until::Bytes(bytes),
            None => Until::Time(args.runtime.unwrap_or(RUNTIME)),
        },
        warm_up: args.warm_up,
        region: args.offset..end,
        verify: args.verify,
        fua: args.fua,
        seed: args.seed,
    };
    let line = output::status_line(global);
    let report = bench::run(disk.clone(), config, |p| {
        let stage = if p.warming_up {
            "warming up"
        } else {
            "measuring"
        };
        line.set_message(format!(
            "{stage} {:>3.0} %  {:>9.0} IOPS  {}/s",
            100.0 * p.done,
            p.iops,
            units::show_size(p.bytes_per_second as u64)
        ));
    });
    line.finish_and_clear();
    disk.close();
    let report = report?;
    let document = Document {
        url: args.url.to_string(),
        report: &report,
    };
    output::result(&document, global, |out| print(out, &document.url, &report))
}

fn print(out: &mut dyn Write, url: &str, report: &Report) -> io::Result<()> {
    let pattern = match report.pattern {
        Pattern::Random => "random",
        Pattern::Sequential => "sequential",
    };
    writeln!(
        out,
        "{url}: {pattern}, {} blocks, depth {}, {} job(s), {:.1} s",
        units::show_size(report.block_size.into()),
        report.depth,
        report.jobs,
        report.runtime_seconds
    )?;
    for (name, direction) in [("read", &report.read), ("write", &report.write)] {
        print_direction(out, name, direction)?;
    }
    if let Some(verified) = &report.verified {
        writeln!(out, "verified: {} blocks, all right", verified.blocks)?;
    }
    Ok(())
}

fn print_direction(out: &mut dyn Write, name: &str, direction: &Direction) -> io::Result<()> {
    let Some(latency) = &direction.lat_ns else {
        return Ok(());
    };
    writeln!(
        out,
        "{name:<5}: {:.0} IOPS, {}/s",
        direction.iops,
        units::show_size(direction.bw_bytes as u64)
    )?;
    let us = |ns: u64| ns as f64 / 1000.0;
    writeln!(
        out,
        "       latency in us: min {:.1}, mean {:.1}, p50 {:.1}, p90 {:.1}, p99 {:.1}, p99.9 {:.1}, max {:.1}",
        us(latency.min),
        latency.mean / 1000.0,
        us(latency.p50),
        us(latency.p90),
        us(latency.p99),
        us(latency.p99_9),
        us(latency.max)
    )
}
