// The conversations that all views share. Not built yet.
import { signal } from "./ui.js";

export const conversations = signal([]);

export async function refreshConversations() {}

export function touchConversation() {}
