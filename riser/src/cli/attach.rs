//! `riser attach`: attaches a logical unit as a file, network block device or block device.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;

use riser_block::ByteDevice;
use riser_exports::fuse::{Caching, FuseOptions};
use riser_exports::nbd::{NbdServer, NbdUri, Server};

use super::args::{AttachArgs, Global};
use super::blockdev;
use super::disk::Disk;
use super::exit::{CliError, Exit};
use super::serve::{self, Event, Ready};
use super::state::Export;
use super::{file, mount};

pub(super) fn run(args: &AttachArgs, global: &Global) -> Result<(), CliError> {
    serve::run(&args.serve, global, |events, sender, ready| {
        let access = serve::access(&args.serve, global, args.read_only);
        let mut link = args.link.clone();
        let choice = match args.ublk {
            Some(number) => Some(blockdev::DeviceChoice::find(number, &args.url)?),
            None => None,
        };
        match (&args.fuse, &args.nbd) {
            (Some(path), _) => mount::check_vacant(path, global)?,
            (None, Some(socket)) => serve::check_vacant(socket, global)?,
            (None, None) => {}
        }
        // The port of a block device is stored in the list of attachments.
        let port = match (&choice, args.fuse.as_ref().or(args.nbd.as_ref())) {
            (None, Some(path)) => serve::export_port(path, &args.url)?,
            _ => None,
        };
        if let Some(choice) = &choice {
            choice.set_on(&mut link);
        } else if let Some(port) = &port {
            port.set_on(&mut link);
        }
        serve::with_disk(&args.url, &link, access, port, ready, |disk, ready| {
            let bytes = || Arc::new(ByteDevice::new(disk.clone()));
            match (choice, &args.fuse, &args.nbd) {
                (Some(choice), ..) => {
                    blockdev::serve(choice, &args.url, disk, events, sender, ready)
                }
                (None, Some(path), _) => serve_fuse(args, path, &bytes(), events, sender, ready),
                (None, None, Some(socket)) => serve_nbd(args, socket, &bytes(), events, ready),
                (None, None, None) => Err(CliError::new(
                    Exit::Usage,
                    "missing --fuse, --nbd or --ublk",
                )),
            }
        })
    })
}

fn serve_fuse(
    args: &AttachArgs,
    path: &Path,
    device: &Arc<ByteDevice<Disk>>,
    events: &mpsc::Receiver<Event>,
    sender: &mpsc::Sender<Event>,
    ready: &mut Ready<'_>,
) -> Result<(), CliError> {
    let path = serve::absolute(path)?;
    let path = path
        .canonicalize()
        .map_err(|e| CliError::io(format!("cannot resolve {}", path.display()), e))?;
    let name = args.url.name();
    let file = match path.is_dir() {
        true => path.join(&name),
        false => path.clone(),
    };
    let export = |id| Export::Fuse {
        path: path.clone(),
        file: file.clone(),
        id,
    };
    ready.claim(&args.url, device.device(), export(None), None)?;
    let options = FuseOptions {
        path: path.clone(),
        name,
        source: args.url.to_string(),
        caching: if args.cache {
            Caching::Kernel
        } else {
            Caching::Direct
        },
        allow_other: args.allow_other,
    };
    let mount = file::mount(device, options, sender.clone())?;
    ready.announce(export(Some(mount.id())))?;
    let mut detached = Ok(());
    // This can't fail because the sender is alive until this function returns.
    let event = events.recv();
    ready.mark_detached();
    if event == Ok(Event::Signal) {
        detached = mount.detach();
        if detached.is_ok() && !mount.is_ended() {
            tracing::warn!(
                "the file is still open; serving it until it is closed, or until a second signal"
            );
            let _ = events.recv();
        }
    }
    // Always flush data written by users.
    file::finish(mount, device)?;
    detached.map_err(CliError::from)
}

fn serve_nbd(
    args: &AttachArgs,
    socket: &Path,
    device: &Arc<ByteDevice<Disk>>,
    events: &mpsc::Receiver<Event>,
    ready: &mut Ready<'_>,
) -> Result<(), CliError> {
    let socket = serve::absolute(socket)?;
    let name = args.url.name();
    let disk = device.device();
    let failed = |e| {
        CliError::io(format!("cannot serve NBD on {}", socket.display()), e).help(
            "the directory must exist, and the path must be unused or a socket without a \
                 listening process",
        )
    };
    let uri = NbdUri {
        server: NbdServer::Unix(socket.clone()),
        export: name.clone(),
    };
    let export = Export::Nbd {
        uri: uri.to_string(),
        socket: socket.clone(),
    };
    // Reserve the path before binding the socket: a socket without a listener is replaced, and only
    // a single process is allowed to do this.
    ready.claim(&args.url, disk, export.clone(), None)?;
    let server = Server::bind(&socket, device.clone(), &name, &disk.description())
        .and_then(Server::start)
        .map_err(failed)?;
    ready.announce(export)?;
    // The only possible event is a signal.
    let _ = events.recv();
    ready.mark_detached();
    let what = format!("the NBD server on {} failed", socket.display());
    server.stop().map_err(|e| CliError::io(what, e))
}
