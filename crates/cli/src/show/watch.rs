//! Waits for changes of the objects that `show --watch` shows.

use std::io::{IsTerminal as _, Write as _};
use std::pin::Pin;
use std::time::Duration;

use anyhow::bail;
use futures::stream::{SelectAll, Stream, StreamExt as _, select_all};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

use crate::reach::ApiReach;
use crate::render::Output;
use cadastre_api::{IPAMBlock, IPClaim, IPPool, NodeSubnet};

/// Changes often come in bursts, so changes within this time of each other are shown together.
const CALM: Duration = Duration::from_millis(300);

/// A stream with one item for each change. An error in the stream ends the watch.
type Ticks = Pin<Box<dyn Stream<Item = Result<(), String>> + Send>>;

/// Watches of IPPools, IPAMBlocks, IPClaims, NodeSubnets, Nodes and pods.
pub(super) struct Watch {
    ticks: SelectAll<Ticks>,
}

impl Watch {
    pub(super) fn start(reach: &ApiReach) -> Self {
        let client = &reach.client;
        let kinds = [
            follow::<IPPool>(Api::all(client.clone())),
            follow::<IPAMBlock>(Api::all(client.clone())),
            follow::<IPClaim>(Api::all(client.clone())),
            follow::<NodeSubnet>(Api::all(client.clone())),
            follow::<Node>(Api::all(client.clone())),
            follow::<Pod>(Api::all(client.clone())),
        ];
        Self {
            ticks: select_all(kinds),
        }
    }

    /// Waits for a change, and then until no more changes arrive for the time `CALM`.
    pub(super) async fn changed(&mut self) -> anyhow::Result<()> {
        match self.ticks.next().await {
            Some(Ok(())) => {}
            Some(Err(why)) => bail!("the watch has ended: {why}"),
            None => bail!("the watch has ended"),
        }
        // If objects change all the time, the result must be shown nevertheless, so this wait has a limit.
        let most = tokio::time::sleep(CALM * 5);
        tokio::pin!(most);
        loop {
            tokio::select! {
                () = &mut most => return Ok(()),
                tick = tokio::time::timeout(CALM, self.ticks.next()) => match tick {
                    Err(_) | Ok(None) => return Ok(()),
                    Ok(Some(Ok(()))) => {}
                    Ok(Some(Err(why))) => bail!("the watch has ended: {why}"),
                },
            }
        }
    }

    /// Clears the terminal before the result is shown again.
    pub(super) fn clear(output: Output) {
        let mut out = std::io::stdout();
        if out.is_terminal() && matches!(output, Output::Table | Output::Wide) {
            let _ = out.write_all(b"\x1b[H\x1b[2J\x1b[3J");
        }
    }
}

fn follow<K>(api: Api<PartialObjectMeta<K>>) -> Ticks
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let events = watcher(api, watcher::Config::default());
    let ticks = events.filter_map(|event| async {
        match event {
            // A new list may contain any changes, so the end of a list counts as a change.
            Ok(watcher::Event::Apply(_) | watcher::Event::Delete(_) | watcher::Event::InitDone) => {
                Some(Ok(()))
            }
            Ok(watcher::Event::Init | watcher::Event::InitApply(_)) => None,
            Err(error) => Some(Err(error.to_string())),
        }
    });
    Box::pin(ticks)
}
