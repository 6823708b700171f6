//! Runs each system with the same file.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::clients::Run;
use super::cpu;
use super::reading::Reading;
use super::servers::{Place, Served};
use super::systems::{Client, System};
use super::workloads::Load;
use crate::packages::{ensure, needs};
use crate::{Failure, daemon, sh};

/// Maximum number of units per target.
pub(super) const MAX_UNITS: usize = 64;

/// Options used for all measurements.
#[derive(clap::Args)]
pub(super) struct Setup {
    /// Measurement duration in seconds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) seconds: u32,
    /// File size in MiB.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(64..))]
    pub(super) size_mb: u64,
    /// Directory for the file; use a tmpfs to measure the software, or a disk to measure the disk.
    #[arg(long = "folder", default_value = "/dev/shm")]
    pub(super) directory: PathBuf,
    /// Directory of riserd and riser; by default they are built first.
    #[arg(long)]
    pub(super) programs: Option<PathBuf>,
}

/// Files and programs used for a run.
pub(super) struct Rig {
    _scratch: sh::Scratch,
    pub(super) place: Place,
    pub(super) image: PathBuf,
    pub(super) seconds: u32,
    pub(super) size_mib: u64,
    /// Set if the programs were built from our sources.
    pub(super) is_built: bool,
}

/// Client results, and CPU time of both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    pub(super) reading: Reading,
    pub(super) server: Duration,
    pub(super) client: Duration,
}

impl Rig {
    /// Installs the packages required by these systems, builds our programs and fills the file.
    pub(super) fn prepare(setup: &Setup, systems: &[&System]) -> Result<Self, Failure> {
        let wants = |program: &str| {
            let mut programs = systems.iter().flat_map(|system| &system.programs);
            program == "fio" || programs.any(|wanted| *wanted == program)
        };
        let needs = needs("bench").filter(|need| wants(&need.program));
        if ensure(needs).iter().any(|need| need.program == "fio") {
            return Err("fio is required to fill the file".into());
        }
        let programs = match &setup.programs {
            Some(directory) => directory.clone(),
            None => {
                println!("building riserd and riser");
                daemon::build_dist()?
            }
        };
        let scratch = sh::Scratch::below(&setup.directory, "bench")?;
        let rig = Self {
            image: scratch.join("disk.img"),
            place: Place {
                scratch: scratch.path().to_owned(),
                programs,
            },
            _scratch: scratch,
            seconds: setup.seconds,
            size_mib: setup.size_mb,
            is_built: setup.programs.is_none(),
        };
        fill(&rig.image, setup.size_mb)?;
        Ok(rig)
    }

    pub(super) fn lacks(&self, system: &System) -> Option<String> {
        let mut programs = system.programs.iter();
        if let Some(program) = programs.find(|program| sh::which(program).is_none()) {
            return Some(format!("{program} is missing"));
        }
        let has_engine = || sh::output(&mut sh::cmd("fio", ["--enghelp=nbd"])).is_ok();
        match system.client {
            Client::Nbd if !has_engine() => return Some("fio has no nbd engine".to_owned()),
            Client::Wire => {}
            // All other clients have been supported by `riser` for a long time.
            _ => return None,
        }
        let load = Load {
            rw: "read",
            block_size: 128 << 10,
            depth: 8,
        };
        let brief = Run {
            seconds: 1,
            ..self.run(&load)
        };
        let tried = self.served(system).and_then(|served| {
            let mut command = brief.command(system.client, &served.disks[0])?;
            brief
                .reading(system.client, &sh::output(&mut command)?)?
                .some()
        });
        let why = tried.err()?.to_string();
        // The first line contains the command.
        why.lines().nth(1).or(why.lines().next()).map(str::to_owned)
    }

    /// Starts the server of a system, measures this load and stops the server again, so that the
    /// next measurement can't use data cached by a server.
    pub(super) fn measure(&self, system: &System, load: &Load) -> Result<Measured, Failure> {
        self.measure_run(system, &self.run(load))
    }

    pub(super) fn measure_run(&self, system: &System, run: &Run<'_>) -> Result<Measured, Failure> {
        let served = self.served(system)?;
        let mut command = run.command(system.client, &served.disks[0])?;
        let log = self.place.scratch.join("client.log");
        let ran = cpu::run(&mut command, &served.processes(), &log)?;
        served.stop()?;
        Ok(Measured {
            reading: run.reading(system.client, &ran.output)?.some()?,
            server: ran.server,
            client: ran.client,
        })
    }

    pub(super) fn served(&self, system: &System) -> Result<Served, Failure> {
        let images = std::slice::from_ref(&self.image);
        self.place.serve(system.server, images)
    }

    pub(super) fn run(&self, load: &Load) -> Run<'_> {
        Run {
            place: &self.place,
            load: *load,
            jobs: 1,
            seconds: self.seconds,
            warm_up: 0,
            loss: None,
            rate: None,
        }
    }

    /// Returns files for [`MAX_UNITS`] units. Their total size is the size of the single file.
    pub(super) fn unit_images(&self) -> Result<Vec<PathBuf>, Failure> {
        let path = |unit| self.place.scratch.join(format!("unit{unit}.img"));
        let images: Vec<_> = (0..MAX_UNITS).map(path).collect();
        for image in images.iter().filter(|image| !image.exists()) {
            fill(image, self.size_mib / MAX_UNITS as u64)?;
        }
        Ok(images)
    }
}

/// Fills a file with data: if the file is sparse, reads would never access the disk.
fn fill(image: &Path, mib: u64) -> Result<(), Failure> {
    let options = "--name=fill --rw=write --bs=1m --ioengine=sync --minimal";
    let mut command = sh::cmd("fio", options.split(' '));
    command.args([
        format!("--filename={}", image.display()),
        format!("--size={mib}m"),
    ]);
    sh::output(&mut command).map(drop)
}
