//! Clients: their command lines, and which figures they print.

use std::process::Command;

use super::reading::{self, Reading};
use super::servers::{Address, Place};
use super::systems::Client;
use super::workloads::Load;
use crate::{Failure, sh};

/// Bytes of a block of the SCSI units, which `iscsi-perf` counts in.
const BLOCK: u32 = 512;

/// Client of NBD servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum NbdClient {
    /// fio, if it has the engine, otherwise riser
    Auto,
    /// fio's nbd engine
    Fio,
    /// `riser bench nbd+unix://...`
    Riser,
}

impl NbdClient {
    /// Decides which one it is: Debian's fio has the engine, other builds may lack it.
    pub(super) fn decided(self) -> Self {
        let has_engine = || sh::output(&mut sh::cmd("fio", ["--enghelp=nbd"])).is_ok();
        match self {
            Self::Auto if has_engine() => Self::Fio,
            Self::Auto => Self::Riser,
            decided => decided,
        }
    }

    /// Name in the results file.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Riser => "riser",
            Self::Auto | Self::Fio => "fio",
        }
    }
}

/// One run of a client.
pub(super) struct Run<'a> {
    pub(super) place: &'a Place,
    pub(super) load: Load,
    /// Jobs at once, each with a connection of its own where there are connections.
    pub(super) jobs: u32,
    pub(super) seconds: u32,
    /// Seconds before them. Their operations take processor time and are not counted, so there are
    /// none where that time is measured.
    pub(super) warm_up: u32,
    /// Packets that the software NIC of the client loses in each direction, in percent; none is a
    /// NIC without injected faults.
    pub(super) loss: Option<f64>,
    /// Operations per second that arrive at random (an open loop); without, the next begins when
    /// one has ended.
    pub(super) rate: Option<u64>,
    pub(super) nbd_client: NbdClient,
}

impl Run<'_> {
    /// Command line of the client for a disk.
    pub(super) fn command(&self, client: Client, disk: &Address) -> Result<Command, Failure> {
        match (client, disk) {
            (Client::Fio, Address::File { path, direct }) => Ok(self.fio(&[
                "--ioengine=io_uring".to_owned(),
                format!("--filename={}", path.display()),
                format!("--direct={}", u8::from(*direct)),
            ])),
            (Client::Nbd, Address::Url(url)) if self.nbd_client != NbdClient::Riser => {
                Ok(self.fio(&["--ioengine=nbd".to_owned(), format!("--uri={url}")]))
            }
            (Client::Nbd | Client::Riser, Address::Url(url)) => Ok(self.riser(url)),
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

    /// Figures in the output of that command.
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

    fn run(place: &Place, nbd_client: NbdClient) -> Run<'_> {
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
            nbd_client,
        }
    }

    fn words(client: Client, disk: &Address, nbd_client: NbdClient) -> String {
        let place = place();
        let command = run(&place, nbd_client).command(client, disk).unwrap();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words = words.map(|word| word.to_string_lossy().into_owned());
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn nbd_servers_have_the_client_that_was_decided_on() {
        let disk = Address::Url("nbd+unix:///?socket=/s".into());
        let fio = words(Client::Nbd, &disk, NbdClient::Fio);
        assert!(
            fio.starts_with("fio ") && fio.ends_with("--ioengine=nbd --uri=nbd+unix:///?socket=/s")
        );
        let riser = words(Client::Nbd, &disk, NbdClient::Riser);
        assert!(
            riser.starts_with("/programs/riser -o json bench nbd+unix:///?socket=/s --overwrite")
        );
        assert_eq!(NbdClient::Riser.decided(), NbdClient::Riser);
    }

    #[test]
    fn clients_get_the_load_in_their_own_words() {
        let url = Address::Url("iscsi://h/t/1".into());
        let perf = words(Client::IscsiPerf, &url, NbdClient::Fio);
        assert_eq!(perf, "iscsi-perf -r -b 8 -m 32 -t 5 iscsi://h/t/1");
        let riser = words(Client::Riser, &url, NbdClient::Fio);
        assert!(riser.ends_with("--inject loss=0.5 --rw randwrite --bs 4096 --depth 32 --jobs 1 --warm-up 0s --runtime 5s"));
        let sharing = words(Client::Sharing, &url, NbdClient::Fio);
        assert_eq!(sharing, format!("{riser} --provider shm"));
        let place = place();
        let open = Run {
            rate: Some(700),
            ..run(&place, NbdClient::Fio)
        };
        let command = open.command(Client::Riser, &url).unwrap();
        assert!(command.get_args().any(|arg| arg == "700"));
        let has = |loss, word: &str| {
            let run = Run {
                loss,
                ..run(&place, NbdClient::Fio)
            };
            let command = run.command(Client::Riser, &url).unwrap();
            command.get_args().any(|arg| arg == word)
        };
        // An injector that loses nothing is not the same as none.
        assert!(has(Some(0.0), "loss=0") && !has(None, "--inject"));
        let file = Address::File {
            path: "/mnt/lun0".into(),
            direct: true,
        };
        let fio = words(Client::Fio, &file, NbdClient::Fio);
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
    fn a_client_without_its_kind_of_disk_is_refused() {
        let place = place();
        let run = run(&place, NbdClient::Fio);
        let url = Address::Url("srp://h/0".into());
        assert!(run.command(Client::Fio, &url).is_err());
    }
}
