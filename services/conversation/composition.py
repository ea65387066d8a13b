"""The parts of a conversation service, put together on a bus and a pool."""

from pathlib import Path

from services.conversation.archive import Archive
from services.conversation.contexts import Contexts
from services.conversation.conversation_store import ConversationStore
from services.conversation.conversation_verbs import ConversationVerbs
from services.conversation.conversations import Conversations
from services.conversation.figures import Figures
from services.conversation.guards import Guards
from services.conversation.history_cache import HistoryCache
from services.conversation.input_check import InputCheck
from services.conversation.item_verbs import ItemVerbs
from services.conversation.marks import QueuedMarks
from services.conversation.prompts import load_models
from services.conversation.queueing import Queueing
from services.conversation.quota_store import QuotaStore
from services.conversation.quotas import Quotas
from services.conversation.sending import Sender
from services.conversation.service import ConversationService
from services.conversation.settings import ConversationSettings
from services.conversation.shards import Shards
from services.conversation.store import Store
from services.conversation.verbs import Verbs
from shared.bus import Bus
from shared.catalog import Catalog, parse_catalog
from shared.errors import ConfigError
from shared.log_store import LogStore
from shared.storage import Pool
from shared.subjects import Names
from shared.telemetry import Journal, Log, Metrics
from shared.valkey import Valkey


def read_catalog(path: Path) -> Catalog:
    """Raises ConfigError."""
    try:
        return parse_catalog(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"the model catalog {path} cannot be read: {error.strerror}. Check CHORUS_CATALOG."
        ) from error


def compose(
    settings: ConversationSettings, catalog: Catalog, *, bus: Bus, pool: Pool, metrics: Metrics, log: Log
) -> ConversationService:
    """A service that is not started; raises ModelFileError for a model file without a usable tokenizer."""
    parts = _Parts(settings, catalog, bus=bus, pool=pool, metrics=metrics, log=log)
    sender, verbs = parts.sender(), parts.verbs()
    return ConversationService(
        models=tuple(parts.models),
        log_shards=settings.log_shards,
        names=parts.names,
        bus=bus,
        pool=pool,
        store=parts.store,
        sender=sender,
        verbs=verbs,
        conversations=parts.conversations(sender, verbs),
        items=parts.items(verbs),
        archive=parts.archive,
        guards=parts.guards(),
        marks=parts.marks,
        shards=parts.shards,
        valkey=parts.valkey,
        journal=parts.journal,
        figures=parts.figures,
        log=log,
    )


class _Parts:
    """What several parts share, and the parts made of it."""

    def __init__(
        self, settings: ConversationSettings, catalog: Catalog, *, bus: Bus, pool: Pool, metrics: Metrics, log: Log
    ) -> None:
        self.settings, self.catalog, self.bus, self.log = settings, catalog, bus, log
        self.names, self.name = Names(settings.region), f"conversation/{settings.name}"
        self.figures, self.journal = Figures(metrics), Journal(bus, self.names, "conversation", metrics)
        self.store, self.logs = Store(pool), LogStore(bus, self.names)
        self.lines = ConversationStore(self.store)
        self.queueing, self.shards = Queueing(bus, self.logs), Shards(bus, self.names, settings.log_shards)
        self.valkey = _valkey(settings, self.figures, self.journal)
        self.cache = HistoryCache(self.valkey, settings.region, self.figures)
        quota_store = None if self.valkey is None else QuotaStore(self.valkey, settings.region)
        self.quotas = Quotas(quota_store, catalog, settings.tokens_per_min, self.figures)
        self.archive = Archive(
            store=self.store, quotas=self.quotas, bus=bus, journal=self.journal, figures=self.figures, log=log
        )
        self.marks = QueuedMarks(self.store, log)
        self.models = load_models(catalog)

    def sender(self) -> Sender:
        return Sender(
            name=self.name,
            names=self.names,
            models=self.models,
            store=self.store,
            logs=self.logs,
            contexts=Contexts(self.store, self.logs, self.cache),
            conversations=Conversations(
                name=self.name, names=self.names, store=self.lines, logs=self.logs, bus=self.bus, journal=self.journal
            ),
            check=InputCheck(
                self.bus, self.names, self.journal, self.figures, fail_open=self.settings.safety_fail_open
            ),
            quotas=self.quotas,
            mini=None if self.catalog.mini is None else self.models[self.catalog.mini.id],
            queueing=self.queueing,
            shards=self.shards,
            marks=self.marks,
            archive=self.archive,
            journal=self.journal,
            figures=self.figures,
            log=self.log,
            isolate_tenants=self.settings.isolate_tenants,
        )

    def guards(self) -> Guards:
        return Guards(
            name=self.name,
            names=self.names,
            store=self.store,
            logs=self.logs,
            bus=self.bus,
            queueing=self.queueing,
            archive=self.archive,
            journal=self.journal,
            figures=self.figures,
            log=self.log,
        )

    def verbs(self) -> Verbs:
        return Verbs(
            name=self.name,
            names=self.names,
            store=self.store,
            logs=self.logs,
            bus=self.bus,
            archive=self.archive,
            journal=self.journal,
            cache=self.cache,
            log_shards=self.settings.log_shards,
        )

    def conversations(self, sender: Sender, verbs: Verbs) -> ConversationVerbs:
        return ConversationVerbs(
            store=self.lines,
            shards=self.shards,
            model=self.models[self.catalog.default.id],
            stop=verbs.stop,
            send=sender.send,
            cache=self.cache,
            journal=self.journal,
        )

    def items(self, verbs: Verbs) -> ItemVerbs:
        return ItemVerbs(
            store=self.lines,
            shards=self.shards,
            model=self.models[self.catalog.default.id],
            stop=verbs.stop,
            cache=self.cache,
            journal=self.journal,
        )


def _valkey(settings: ConversationSettings, figures: Figures, journal: Journal) -> Valkey | None:
    """Told of in the journal when it goes and when it is back; nobody waits for it."""
    if not settings.redis_url:
        return None

    def changed(away: bool, why: str) -> None:
        figures.valkey_away.set(away)
        journal.note("valkey_away" if away else "valkey_back", why=why)

    return Valkey(settings.redis_url.reveal(), changed=changed)
