//! Benchmark clients: creates the command lines and parses the output.

use std::process::Command;

use super::reading::{self, Reading};
use super::servers::{Address, Place};
use super::systems::Client;
use super::workloads::Load;
use crate::{Failure, sh};

/// Block size of the SCSI units in bytes, used as a unit by `iscsi-perf`.
const BLOCK: u32 = 512;

/// Parameters for a single measurement with a client.
pub(super) struct Run<'a> {
    pub(super) place: &'a Place,
    pub(super) load: Load,
    /// Number of parallel jobs. Every job uses a separate connection, if there are connections.
    pub(super) jobs: u32,
    pub(super) seconds: u32,
    /// Warm-up time in seconds before the measurement. These operations are not counted, but they
    /// still use CPU time, so this must be zero if we measure CPU time.
    pub(super) warm_up: u32,
    /// Packet loss of the client's software NIC in each direction, in percent. If `None`, no faults
    /// are injected.
    pub(super) loss: Option<f64>,
    /// Rate of an open loop with random arrivals, in operations per second. If `None`, the next
    /// operation is sent when the previous one has completed.
    pub(super) rate: Option<u64>,
}

impl Run<'_> {
    pub(super) fn command(&self, client: Client, disk: &Address) -> Result<Command, Failure> {
        match (client, disk) {
            (Client::Fio, Address::File { path, direct }) => Ok(self.fio(&[
                "--ioengine=io_uring".to_owned(),
                format!("--filename={}", path.display()),
                format!("--direct={}", u8::from(*direct)),
            ])),
            (Client::Nbd, Address::Url(url)) => {
                Ok(self.fio(&["--ioengine=nbd".to_owned(), format!("--uri={url}")]))
            }
            (Client::Riser, Address::Url(url)) => Ok(self.riser(url)),
            (Client::Sharing, Address::Url(url)) => {
                let mut command = self.riser(url);
                command.args(["--provider", "shm"]);
                Ok(command)
            }
            (Client::IscsiPerf, Address::Url(url)) => Ok(self.iscsi_perf(url)),
            (Client::Wire, _) => {
                let runtime = format!("{}s", self.seconds);
                let args = ["-o", "json", "bench", "wire", "--runtime", &runtime];
                Ok(self.place.riser(args))
            }
            (client, disk) => Err(format!("{client:?} cannot use {disk:?}").into()),
        }
    }

    pub(super) fn reading(&self, client: Client, output: &str) -> Result<Reading, Failure> {
        match client {
            Client::IscsiPerf => reading::iscsi_perf(output, &self.load, f64::from(self.seconds)),
            Client::Wire => reading::wire(output, &self.load),
            Client::Fio | Client::Nbd | Client::Riser | Client::Sharing => {
                reading::json(output, &self.load)
            }
        }
    }

    fn fio(&self, engine: &[String]) -> Command {
        let Load {
            rw,
            block_size,
            depth,
        } = self.load;
        let fixed = "--name=bench --output-format=json --time_based --randrepeat=0 --norandommap \
                     --group_reporting --lat_percentiles=1";
        let mut command = sh::cmd("fio", fixed.split_whitespace());
        command.args([
            format!("--rw={rw}"),
            format!("--bs={block_size}"),
            format!("--iodepth={depth}"),
            format!("--runtime={}", self.seconds),
            format!("--ramp_time={}", self.warm_up),
            format!("--numjobs={}", self.jobs),
        ]);
        command.args(engine);
        command
    }

    fn riser(&self, url: &str) -> Command {
        let mut command = self.place.riser(["-o", "json", "bench", url]);
        if self.load.is_write() {
            command.arg("--overwrite");
        }
        if let Some(loss) = self.loss {
            command.args(["--inject", &format!("loss={loss}")]);
        }
        if let Some(rate) = self.rate {
            command.args([
                "--rate-process",
                "poisson",
                "--rate-iops",
                &rate.to_string(),
            ]);
        }
        command.args(["--rw", self.load.rw]);
        for (option, value) in [
            ("--bs", self.load.block_size),
            ("--depth", self.load.depth),
            ("--jobs", self.jobs),
        ] {
            command.args([option, &value.to_string()]);
        }
        for (option, seconds) in [("--warm-up", self.warm_up), ("--runtime", self.seconds)] {
            command.args([option, &format!("{seconds}s")]);
        }
        command
    }

    fn iscsi_perf(&self, url: &str) -> Command {
        let mut command = sh::cmd("iscsi-perf", self.load.is_random().then_some("-r"));
        for (option, value) in [
            ("-b", self.load.block_size / BLOCK),
            ("-m", self.load.depth),
            ("-t", self.seconds),
        ] {
            command.args([option, &value.to_string()]);
        }
        command.arg(url);
        command
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn place() -> Place {
        Place {
            scratch: PathBuf::from("/scratch"),
            programs: PathBuf::from("/programs"),
        }
    }

    fn run(place: &Place) -> Run<'_> {
        Run {
            place,
            load: Load {
                rw: "randwrite",
                block_size: 4096,
                depth: 32,
            },
            jobs: 1,
            seconds: 5,
            warm_up: 0,
            loss: Some(0.5),
            rate: None,
        }
    }

    fn words(client: Client, disk: &Address) -> String {
        let place = place();
        let command = run(&place).command(client, disk).unwrap();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words = words.map(|word| word.to_string_lossy().into_owned());
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn nbd_servers_use_fio() {
        let disk = Address::Url("nbd+unix:///?socket=/s".into());
        let fio = words(Client::Nbd, &disk);
        assert!(
            fio.starts_with("fio ") && fio.ends_with("--ioengine=nbd --uri=nbd+unix:///?socket=/s")
        );
    }

    #[test]
    fn client_commands_contain_load() {
        let url = Address::Url("iscsi://h/t/1".into());
        let perf = words(Client::IscsiPerf, &url);
        assert_eq!(perf, "iscsi-perf -r -b 8 -m 32 -t 5 iscsi://h/t/1");
        let riser = words(Client::Riser, &url);
        assert!(riser.ends_with("--inject loss=0.5 --rw randwrite --bs 4096 --depth 32 --jobs 1 --warm-up 0s --runtime 5s"));
        let sharing = words(Client::Sharing, &url);
        assert_eq!(sharing, format!("{riser} --provider shm"));
        let place = place();
        let open = Run {
            rate: Some(700),
            ..run(&place)
        };
        let command = open.command(Client::Riser, &url).unwrap();
        assert!(command.get_args().any(|arg| arg == "700"));
        let has = |loss, word: &str| {
            let run = Run {
                loss,
                ..run(&place)
            };
            let command = run.command(Client::Riser, &url).unwrap();
            command.get_args().any(|arg| arg == word)
        };
        // Note that an injector without loss is not the same as no injector.
        assert!(has(Some(0.0), "loss=0") && !has(None, "--inject"));
        let file = Address::File {
            path: "/mnt/lun0".into(),
            direct: true,
        };
        let fio = words(Client::Fio, &file);
        for part in [
            "--rw=randwrite",
            "--bs=4096",
            "--iodepth=32",
            "--direct=1",
            "--runtime=5",
        ] {
            assert!(fio.contains(part), "{fio}");
        }
    }

    #[test]
    fn client_rejects_unsupported_disk() {
        let place = place();
        let run = run(&place);
        let url = Address::Url("srp://h/0".into());
        assert!(run.command(Client::Fio, &url).is_err());
    }
}
